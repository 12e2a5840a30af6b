"""Trains the conv net of TensorFlow's tutorials on MNIST, on several workers that one command starts.

    python recipes/mnist_mirrored.py --workers 2
    python recipes/mnist_mirrored.py --workers 2 --dataset digits --epochs 2 --out runs/mirrored
    python recipes/mnist_mirrored.py --workers 8 --address 10.0.0.1:6379
    paceline run recipes/mnist_mirrored.py --strategy all-reduce --workers 2 -- --dataset digits

RMSprop, a batch that grows with the replicas, a learning rate that falls by epochs, a line an epoch, and checkpoints:
`--resume runs/mirrored` goes on from the last one. Digits come with Paceline; other data sets are taken from the folder
in PACELINE_DATA, or downloaded.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from paceline.compat.strategies import MirroredStrategy, MultiWorkerMirroredStrategy
from paceline.data import collate, load

Callback = Callable[[int], None]
"""Called with an epoch's number, from 0."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, help="replicas; by default every GPU, or one; of a run, those it has")
    parser.add_argument("--address", help="a Ray cluster's, on all of whose hosts to train; else on this one")
    parser.add_argument("--dataset", choices=("digits", "mnist", "fashion-mnist"), default="mnist")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step and replica")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--out", help="the result directory; by default a new one under runs/")
    parser.add_argument("--resume", help="the result directory of a run to go on with")
    return parser.parse_args()


def make_model(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """From images [B, C, H, W] to logits [B, num_classes]."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * ((height - 2) // 2) * ((width - 2) // 2), 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


def decay(epoch: int) -> float:
    """The learning rate of an epoch."""
    if epoch < 3:
        return 1e-3
    return 1e-4 if epoch < 7 else 1e-5


def train(args: argparse.Namespace, strategy: MirroredStrategy | MultiWorkerMirroredStrategy) -> None:
    global_batch = strategy.global_batch(args.batch_size)
    with strategy.scope() as worker:
        data = load(args.dataset)
        model = make_model(data.shape, data.num_classes)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=decay(0))
        batch_size = strategy.per_replica_batch(global_batch)
        loader = DataLoader(data.train, batch_size=batch_size, shuffle=True, collate_fn=collate)
        model, optimizer, loader = worker.prepare(model, optimizer, loader)
        test_x, test_y = data.test[:]

    @worker.evaluation
    def accuracy(model: nn.Module) -> dict[str, float]:
        correct = sum(
            int((model(x.to(worker.device)).argmax(dim=1).cpu() == y).sum())
            for x, y in zip(test_x.split(2000), test_y.split(2000), strict=True)
        )
        return {"accuracy": correct / len(test_y), "num_samples": len(test_y)}

    def set_rate(epoch: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = decay(epoch)

    def print_line(epoch: int) -> None:
        if worker.rank == 0:
            rate = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch + 1}: learning rate {rate:g}, {worker.iteration} steps so far", flush=True)

    at_begin: list[Callback] = [set_rate]
    at_end: list[Callback] = [print_line]
    for epoch in range(args.epochs):
        num_before = worker.iteration
        for callback in at_begin:
            callback(epoch)
        for x, y in loader:  # empty in epochs that a resumed run has finished, and once the run is at its end
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(worker.device)), y.to(worker.device))
            loss.backward()
            optimizer.step()
            worker.log(loss=loss)
        if worker.iteration > num_before:
            for callback in at_end:
                callback(epoch)


def main() -> None:
    args = parse_arguments()
    named = MultiWorkerMirroredStrategy if args.address else MirroredStrategy
    strategy = named(workers=args.workers)
    settings = {"checkpoint_every": args.checkpoint_every, "out": args.out, "resume": args.resume}
    if args.address:
        settings["address"] = args.address
    result = strategy.run(train, args=(args, strategy), **settings)
    if result is not None:
        print(result)


if __name__ == "__main__":
    main()
