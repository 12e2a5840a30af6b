"""Trains where each worker has a data set of its own, whose labels are the more uneven the smaller `--alpha`.

paceline run recipes/low_bandwidth/uneven.py --strategy relay --workers 16 --engine virtual --cluster lab-1gbe

All workers have as many samples. Each draws its shares of the labels from a Dirichlet distribution, with `--alpha` for
each label (Hsu et al., 2019, section 3.1); where a label has run out, it takes others.
"""

import argparse
from collections.abc import Iterator

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline.data import load
from paceline.data.dataset import Batch, Split
from paceline.models import NAMES, build


def shared_out(labels: torch.Tensor, num_workers: int, *, alpha: float, seed: int) -> list[torch.Tensor]:
    """The samples of each worker, int64 [N // num_workers]; each sample has one worker at most."""
    generator = numpy.random.default_rng(seed)
    left = [generator.permutation(torch.nonzero(labels == label).flatten().numpy()) for label in labels.unique()]
    parts = []
    for _ in range(num_workers):
        part, logs = [], _log_gammas(generator, numpy.full(len(left), alpha))
        while missing := len(labels) // num_workers - sum(map(len, part)):
            sizes = numpy.array([len(own) for own in left])
            there = numpy.where(sizes > 0, logs, -numpy.inf)
            odds = numpy.exp(there - there.max())
            counts = numpy.minimum(generator.multinomial(missing, odds / odds.sum()), sizes)
            part += [own[:count] for own, count in zip(left, counts, strict=True)]
            left = [own[count:] for own, count in zip(left, counts, strict=True)]
        parts.append(torch.from_numpy(numpy.concatenate(part)))
    return parts


def _log_gammas(generator: numpy.random.Generator, shape: numpy.ndarray) -> numpy.ndarray:
    """Logarithms of gamma variables, which may be below the smallest float: gamma(a) is gamma(a + 1) u ** (1 / a)."""
    return numpy.log(generator.gamma(shape + 1)) + numpy.log(generator.random(len(shape))) / shape


class Own(IterableDataset[Batch]):
    """Batches of this worker's samples alone, in an order drawn anew at each pass."""

    splits_by_rank = True

    def __init__(self, train: Split, own: torch.Tensor, *, batch_size: int, num_steps: int, seed: int) -> None:
        self.train, self.own = train, own
        self.batch_size, self.num_steps = batch_size, num_steps
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Batch]:
        left = torch.empty(0, dtype=torch.int64)
        for _ in range(self.num_steps):
            while len(left) < self.batch_size:
                left = torch.cat([left, self.own[torch.randperm(len(self.own), generator=self.generator)]])
            yield self.train[left[: self.batch_size]]
            left = left[self.batch_size :]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha", type=float, default=1.0, help="the smaller, the fewer labels a worker has")
    parser.add_argument("--dataset", choices=("mnist", "cifar10"), default="mnist")
    parser.add_argument("--model", choices=NAMES, default="convnet")
    parser.add_argument("--epochs", type=float, default=5, help="passes over all workers' samples together")
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    data = load(args.dataset)
    parts = shared_out(data.train.labels, worker.size, alpha=args.alpha, seed=torch.initial_seed())
    num_steps = int(args.epochs * len(parts[0]) / args.batch_size)
    own = Own(
        data.train,
        parts[worker.rank],
        batch_size=args.batch_size,
        num_steps=num_steps,
        seed=torch.initial_seed() + worker.rank,
    )
    model = build(args.model, num_classes=data.num_classes, shape=data.shape)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    loader = DataLoader(own, batch_size=None)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    model, optimizer, loader = worker.prepare(model, optimizer, loader, schedule=schedule)
    test_x, test_y = data.test[:]

    @worker.evaluation
    @torch.inference_mode()
    def accuracy(model: nn.Module) -> dict[str, float]:
        num_correct = sum(
            int((model(x).argmax(dim=1) == y).sum())
            for x, y in zip(test_x.split(2000), test_y.split(2000), strict=True)
        )
        return {"accuracy": num_correct / len(test_y), "num_samples": len(test_y)}

    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(worker.device)), y.to(worker.device))
        loss.backward()
        optimizer.step()
        schedule.step()
        worker.log(loss=loss)


if __name__ == "__main__":
    main()
