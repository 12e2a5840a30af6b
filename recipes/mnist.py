"""Trains a reference model on MNIST, or on the digits that come with Paceline.

    python recipes/mnist.py --dataset digits
    paceline run recipes/mnist.py --strategy fed-avg --workers 2 --option clients=100 --option fraction=0.1

A pass over the data is an epoch, and under strategies with clients one client's turn: then there are as many passes
for each client.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import paceline
from paceline.data import collate, load
from paceline.models import NAMES, build


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("digits", "mnist", "fashion-mnist"), default="mnist")
    parser.add_argument("--model", choices=NAMES, default="mlp")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, default=10, help="images per step")
    parser.add_argument("--part", default="0/1", help="K/N: of the training data only every N-th image, from K on")
    parser.add_argument("--passes", type=int, default=20, help="over all data, or turns of each client")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    data = load(args.dataset)
    model = build(args.model, num_classes=data.num_classes, shape=data.shape)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    first, step = map(int, args.part.split("/"))
    images = Subset(data.train, range(first, len(data.train), step)) if step > 1 else data.train
    loader = DataLoader(images, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    test_x, test_y = data.test[:]

    @worker.evaluation
    def accuracy(model: nn.Module) -> dict[str, float]:
        outputs = torch.cat([model(x.to(worker.device)).cpu() for x in test_x.split(2000)])
        correct = int((outputs.argmax(dim=1) == test_y).sum())
        loss = float(F.cross_entropy(outputs, test_y))
        return {"accuracy": correct / len(test_y), "loss": loss, "num_samples": len(test_y)}

    num_clients = worker.strategy.traits.num_clients
    for _ in range(args.passes * max(1, -(-num_clients // worker.size))):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(worker.device)), y.to(worker.device))
            loss.backward()
            optimizer.step()
            worker.log(loss=loss)


if __name__ == "__main__":
    main()
