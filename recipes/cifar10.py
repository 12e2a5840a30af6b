"""Trains a reference model on CIFAR-10.

    python recipes/cifar10.py --model convnet
    paceline run recipes/cifar10.py --strategy all-reduce --workers 2 -- --model resnet18 --momentum 0.9 --augment

The data set is taken from --data, or from the folder in PACELINE_DATA, or downloaded.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import paceline
from paceline.data import augment_cifar10, collate, load
from paceline.models import NAMES, build


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NAMES, default="convnet")
    parser.add_argument("--optimizer", choices=("sgd", "adam", "adamw"), default="sgd")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.0, help="for sgd")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, default=100, help="images per worker and step")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction, default=False, help="crop and mirror")
    parser.add_argument("--eval-samples", type=int, metavar="N", help="evaluate on the first N test images only")
    parser.add_argument("--data", metavar="DIR", help="folder of the data set, or its parent")
    args = parser.parse_args()
    if args.momentum and args.optimizer != "sgd":
        parser.error(f"--momentum is for sgd; {args.optimizer} does not take it")
    return args


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    optimizer_class = torch.optim.Adam if args.optimizer == "adam" else torch.optim.AdamW
    return optimizer_class(model.parameters(), args.lr, weight_decay=args.weight_decay)


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    cifar10 = load("cifar10", directory=args.data)
    model = build(args.model, num_classes=cifar10.num_classes, shape=cifar10.shape)
    optimizer = make_optimizer(model, args)
    loader = DataLoader(cifar10.train, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)

    test = Subset(cifar10.test, range(len(cifar10.test))[: args.eval_samples])
    test_loader = DataLoader(test, batch_size=1000, collate_fn=collate)

    @worker.evaluation
    @torch.inference_mode()
    def accuracy(model: nn.Module) -> dict[str, float]:
        num_correct = 0
        for x, y in test_loader:
            x, y = x.to(worker.device), y.to(worker.device)
            num_correct += (model(x).argmax(dim=1) == y).sum().item()
        return {"accuracy": num_correct / len(test), "num_samples": len(test)}

    for _ in range(args.epochs):
        for x, y in loader:
            x, y = x.to(worker.device), y.to(worker.device)
            if args.augment:
                x = augment_cifar10(x)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.log(loss=loss)


if __name__ == "__main__":
    main()
