"""Trains a small convolutional network on 8x8 digits: what `paceline demo` runs, and a script to start from."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.data import collate, load
from paceline.models import NAMES, build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=NAMES, default="digitsnet")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--scale-lr", action="store_true", help="times the workers that an update is made of")
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    worker = paceline.init()
    digits = load("digits")
    model = build(args.model, num_classes=digits.num_classes, shape=digits.shape)
    # A batch of n workers' batches allows for n times the learning rate (Goyal et al. 2017, section 2.1).
    joins_all = args.scale_lr and worker.strategy.traits.is_synchronous
    lr = args.lr * worker.size if joins_all else args.lr
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=args.momentum)
    loader = DataLoader(digits.train, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    test_images, test_labels = (tensor.to(worker.device) for tensor in digits.test[:])

    @worker.evaluation
    def accuracy(model: nn.Module) -> dict[str, float]:
        correct = model(test_images).argmax(dim=1) == test_labels
        return {"accuracy": correct.float().mean().item()}

    for _ in range(args.epochs):
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(worker.device)), labels.to(worker.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.log(loss=loss)


if __name__ == "__main__":
    main()
