"""Ratings of items by users: drawn from a planted model, or read from a file in one of MovieLens' formats."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_SEPARATORS = ("::", "\t", ",")
"""Of ratings.dat (1M, 10M), u.data (100K) and ratings.csv (20M and later)."""


class Ratings(NamedTuple):
    users: Tensor
    """int64 of shape (n,), as `items`."""
    items: Tensor
    values: Tensor
    """float32 of shape (n,)."""

    def split(self, share: float, *, seed: int = 0) -> tuple["Ratings", "Ratings"]:
        """All but this share of them, and the rest, drawn at random."""
        order = torch.randperm(len(self.values), generator=torch.Generator().manual_seed(seed))
        cut = round(share * len(order))
        return Ratings(*(each[order[cut:]] for each in self)), Ratings(*(each[order[:cut]] for each in self))


def planted(num_ratings: int, *, users: int, items: int, rank: int = 4, noise: float = 0.5, seed: int = 0) -> Ratings:
    """3.5, and what the user, the item, and the product of their factors add to it, with noise.

    Few items have most of the ratings: the k-th has a share in proportion to 1 / k. The best predictor's root mean
    squared error is `noise`. Ids are 63-bit numbers, as hashes are, that follow from the seed.
    """
    generator = torch.Generator().manual_seed(seed)
    user = torch.randint(0, users, (num_ratings,), generator=generator)
    item = torch.multinomial(1 / torch.arange(1.0, items + 1), num_ratings, replacement=True, generator=generator)
    factors = [torch.randn(count, rank, generator=generator) / math.sqrt(math.sqrt(rank)) for count in (users, items)]
    biases = [torch.randn(count, generator=generator) * 0.3 for count in (users, items)]
    values = 3.5 + biases[0][user] + biases[1][item] + 0.5 * (factors[0][user] * factors[1][item]).sum(dim=1)
    values += noise * torch.randn(num_ratings, generator=generator)
    ids = [torch.randint(0, 2**63 - 1, (count,), generator=generator) for count in (users, items)]
    return Ratings(ids[0][user], ids[1][item], values)


def read(path: Path) -> Ratings:
    """A file with a user's id, an item's id and a rating in each line. Raises ValueError, which names the line, for
    anything else but a heading."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        separator = next((each for each in _SEPARATORS if each in line), None)
        try:
            user, item, value = line.split(separator)[:3]
            rows.append((int(user), int(item), float(value)))
        except ValueError:
            if number > 1:
                raise ValueError(f"{path}, line {number}: {line[:80]!r} is no user, item and rating") from None
    if not rows:
        raise ValueError(f"{path} has no ratings")
    users, items, values = zip(*rows, strict=True)
    return Ratings(torch.tensor(users), torch.tensor(items), torch.tensor(values))
