"""The published study's training script: a conv net, ResNet-18 or VGG-16 on CIFAR-10, by plain SGD.

    paceline run recipes/ray_parameter_server/train.py --strategy ps-bsp --workers 2 --target accuracy=0.4

`study.py` beside it runs whole studies. The settings that the study leaves open, and how they were found, are in
docs/experiment.md.
"""

import argparse
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import paceline
from paceline.data import collate, load
from paceline.models.convnet import convnet
from paceline.models.resnet18 import resnet18
from paceline.models.vgg16 import vgg16

EVAL_BATCH_SIZE = 500


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("convnet", "resnet18", "vgg16"), default="convnet")
    parser.add_argument("--width", type=int, default=64, help="channels of ResNet-18's and VGG-16's first stage")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--reduction", choices=("sum", "mean"), default="sum", help="of the losses of a batch")
    parser.add_argument("--inputs", choices=("normalised", "raw"), default="normalised", help="raw: 0 to 255")
    parser.add_argument("--batch-size", type=int, default=100, help="images per worker and step")
    parser.add_argument("--epochs", type=int, default=400, help="what 20 workers take in 10,000 steps of 100 images")
    parser.add_argument("--eval-samples", type=int, default=2000, help="test images of an evaluation, always the same")
    parser.add_argument("--data", metavar="DIR", help="folder of the data set, or its parent")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    cifar10 = load("cifar10", directory=args.data)
    models = {
        "convnet": convnet,
        "resnet18": partial(resnet18, width=args.width),
        "vgg16": partial(vgg16, width=args.width),
    }
    model = models[args.model]()
    # The study's servers add up the gradients that they are given; Paceline's take the mean of what makes an update.
    num_added = worker.size if worker.strategy.traits.is_synchronous else 1
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    loader = DataLoader(cifar10.train, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)

    num_judged = min(args.eval_samples, len(cifar10.test))
    judged = torch.randperm(len(cifar10.test), generator=torch.Generator().manual_seed(0))[:num_judged]
    test_loader = DataLoader(Subset(cifar10.test, judged.tolist()), batch_size=EVAL_BATCH_SIZE, collate_fn=collate)

    def prepared(x: Tensor) -> Tensor:
        if args.inputs == "raw":
            x = x * cifar10.train.std + cifar10.train.mean
        return x.to(worker.device)

    @worker.evaluation
    @torch.inference_mode()
    def accuracy(model: nn.Module) -> dict[str, float]:
        num_correct = 0
        for x, y in test_loader:
            x, y = prepared(x), y.to(worker.device)
            num_correct += (model(x).argmax(dim=1) == y).sum().item()
        return {"accuracy": num_correct / num_judged}

    for _ in range(args.epochs):
        for x, y in loader:
            x, y = prepared(x), y.to(worker.device)
            loss = num_added * F.cross_entropy(model(x), y, reduction=args.reduction)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
