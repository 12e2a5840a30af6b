"""Draws clicks from a planted model, as text in the format of Criteo's data sets.

    python recipes/embeddings/planted_clicks.py clicks.tsv --lines 1000000

says the planted model's log-loss on these lines, which no other predictor's is expected to be below.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, final

import torch
from criteo import NUM_COLUMNS, NUM_COUNTS
from torch import Tensor
from torch.nn import functional as F

_RANK, _CHUNK = 4, 10_000
_MISSING = 0.1
"""Of all numbers and categories."""


class Drawn(NamedTuple):
    text: str
    log_loss: float
    """The planted model's, of this line."""


@final
class PlantedClicks:
    """The logit of a click is affine in log(1 + x) of the numbers, in a weight of each category, and in the products of
    the factors that the categories of four columns have.

    Columns have 3 to 100,000 categories. Category k, counted from 0, comes up in proportion to (1 + k) ** -1.3. The
    rarer a category, the less it matters: its weight and factors are in proportion to 1 / (1 + k / 5).
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        sizes = torch.logspace(0.6, 5, NUM_COLUMNS).long().tolist()
        ranks = [torch.arange(size, dtype=torch.float32) for size in sizes]
        self._shares = [((1 + rank) ** -1.3).double().cumsum(0) for rank in ranks]
        scales = [1 / (1 + rank / 5) for rank in ranks]
        self._weights = [0.4 * scale * self._normal(len(scale)) for scale in scales]
        self._factors = [0.25 * scale[:, None] * self._normal(len(scale), _RANK) for scale in scales[::8]]
        self._slopes = 0.2 * self._normal(NUM_COUNTS)

    def draw(self, num_lines: int) -> Iterator[Drawn]:
        """As many lines, without line ends; each call draws others."""
        for begin in range(0, num_lines, _CHUNK):
            yield from self._chunk(min(_CHUNK, num_lines - begin))

    def _chunk(self, num: int) -> Iterator[Drawn]:
        counts = (1 + self._normal(num, NUM_COUNTS)).exp().long()
        counts[self._uniform(num, NUM_COUNTS) < _MISSING] = -1
        chosen = torch.stack([torch.searchsorted(each, self._uniform(num) * each[-1]) for each in self._shares], dim=1)
        chosen[self._uniform(num, NUM_COLUMNS) < _MISSING] = -1
        logits = self._logits(counts.clamp(min=0), chosen)
        labels = (self._uniform(num) < logits.sigmoid()).float()
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        rows = zip(labels.int().tolist(), counts.tolist(), chosen.tolist(), losses.tolist(), strict=True)
        for label, numbers, ranks, loss in rows:
            fields = [str(label), *("" if number < 0 else str(number) for number in numbers)]
            fields += ["" if rank < 0 else _digits(column, rank) for column, rank in enumerate(ranks)]
            yield Drawn("\t".join(fields), loss)

    def _logits(self, counts: Tensor, chosen: Tensor) -> Tensor:
        is_there = (chosen >= 0).float()
        logits = (counts.float().log1p() - 1) @ self._slopes - 1.2
        for column, weights in enumerate(self._weights):
            logits += weights[chosen[:, column]] * is_there[:, column]
        factors = [each[chosen[:, 8 * n]] * is_there[:, 8 * n, None] for n, each in enumerate(self._factors)]
        total, squares = sum(factors), sum(each.square() for each in factors)
        return logits + (total.square() - squares).sum(dim=1) / 2  # the products of all pairs

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float64)


def _digits(column: int, rank: int) -> str:
    """As a hash would look; no two ranks of a column have the same."""
    return f"{(rank * 2654435769 + column * 40503) % 2**32:08x}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the model and the lines")
    args = parser.parse_args()
    total = 0.0
    with args.file.open("w", encoding="ascii") as file:
        for text, log_loss in PlantedClicks(args.seed).draw(args.lines):
            file.write(text + "\n")
            total += log_loss
    print(f"{args.file}: {args.lines} lines; the planted model's log-loss is {total / args.lines:.4f}")


if __name__ == "__main__":
    main()
