"""Trains a network for so many steps of every worker, whatever an iteration is under the strategy.

paceline run recipes/low_bandwidth/train.py --strategy diloco --workers 8 --engine virtual --cluster lab-1gbe
"""

import argparse
import itertools
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader, Subset

import paceline
from paceline.data import collate, load
from paceline.models import NAMES, build
from paceline.models.resnet18 import resnet18


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("digits", "mnist", "fashion-mnist", "cifar10"), default="mnist")
    parser.add_argument("--model", choices=NAMES, default="convnet")
    parser.add_argument("--width", type=int, default=64, help="channels of resnet18's first stage")
    parser.add_argument("--steps", type=int, default=300, help="of each worker")
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--schedule", choices=("cosine", "constant"), default="cosine", help="of the learning rate")
    parser.add_argument("--eval-samples", type=int, metavar="N", help="evaluate on the first N test images only")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    data = load(args.dataset)
    builder = partial(resnet18, width=args.width) if args.model == "resnet18" else partial(build, args.model)
    model = builder(num_classes=data.num_classes, shape=data.shape)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    loader = DataLoader(data.train, batch_size=args.batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    is_constant = args.schedule == "constant"
    schedule = LambdaLR(optimizer, lambda _: 1.0) if is_constant else CosineAnnealingLR(optimizer, args.steps)
    model, optimizer, loader = worker.prepare(model, optimizer, loader, schedule=schedule)
    test = Subset(data.test, range(len(data.test))[: args.eval_samples])
    test_loader = DataLoader(test, batch_size=1000, collate_fn=collate)

    @worker.evaluation
    @torch.inference_mode()
    def accuracy(model: nn.Module) -> dict[str, float]:
        num_correct = sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in test_loader)
        return {"accuracy": num_correct / len(test), "num_samples": len(test)}

    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for x, y in itertools.islice(batches, args.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(worker.device)), y.to(worker.device))
        loss.backward()
        optimizer.step()
        schedule.step()
        worker.log(loss=loss)


if __name__ == "__main__":
    main()
