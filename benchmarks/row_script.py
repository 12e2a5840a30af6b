"""What each worker runs in prediction_rows.py: steps that look rows of a table up, and sleep instead of computing.

Keys are drawn evenly, or by Zipf's law over keys in an order of their own, and before training begins, as a loader's
processes would have them. Every worker ends after its own steps.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.nn import ShardedEmbedding

LR = 1e-3


class Model(nn.Module):
    """Rows of a table beside a small dense part."""

    def __init__(self, num_rows: int, dim: int) -> None:
        super().__init__()
        self.rows = ShardedEmbedding(num_rows, dim, optimizer=f"adagrad:lr={LR}", name="rows")
        self.layer = nn.Linear(dim, 64)

    def forward(self, keys: Tensor) -> Tensor:
        """A loss of shape (); `keys` has any shape."""
        loss: Tensor = self.layer(self.rows(keys)).square().mean()
        return loss


def drawn(num_batches: int, batch: int, *, num_rows: int, zipf: float, seed: int) -> Tensor:
    """Keys of shape (batches, batch); by Zipf's law with this exponent, or evenly if that is 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, num_rows + 1, dtype=torch.float64).pow(-zipf)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))  # the same keys are frequent for all
    places = torch.searchsorted(weights.cumsum(0) / weights.sum(), torch.rand(num_batches * batch, generator=generator))
    return order[places.clamp_(max=num_rows - 1)].view(num_batches, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sleep-s", type=float, default=0.0, help="sleep so long each step, as if computing elsewhere")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096, help="keys of a step")
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of Zipf's law; 0: keys are alike")
    args = parser.parse_args()
    torch.set_num_threads(1)
    worker, model = paceline.init(), Model(args.rows, args.dim)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches = drawn(args.steps, args.batch, num_rows=args.rows, zipf=args.zipf, seed=worker.rank)
    loader = DataLoader(TensorDataset(torch.arange(args.steps * worker.size)), batch_size=1)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for keys, _ in zip(batches, loader, strict=False):
        if args.sleep_s:
            time.sleep(args.sleep_s)
        optimizer.zero_grad()
        model(keys).backward()
        optimizer.step()


main()
