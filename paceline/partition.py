"""Which samples each client has: a data set's indices, divided among clients. Pure, and the same for the same seed."""

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.pieces import Piece

Column = Callable[[str], Sequence[Any] | Tensor]
"""The value of a column for every sample; the column `label` is what the model is to tell."""
LABEL = "label"
_MAX_DRAWS = 1000


class Partition(Piece, ABC):
    """Divides a data set among clients."""

    sizes_follow_values: ClassVar[bool] = False
    """Whether how many samples a client has depends on what they hold."""

    @abstractmethod
    def divide(self, num_samples: int, num_clients: int, *, column: Column, seed: int) -> list[Tensor]:
        """The samples of each client, int64.

        Raises:
            UsageError: the data cannot be divided so; the message says why.
        """


@final
@dataclass(frozen=True)
class IID(Partition, name="iid"):
    """Shuffled, and cut into equal parts."""

    def divide(self, num_samples: int, num_clients: int, *, column: Column, seed: int) -> list[Tensor]:
        return _cut(_shuffled(num_samples, seed), [1.0] * num_clients)


@final
@dataclass(frozen=True)
class Shards(Partition, name="shards"):
    """Sorted by label and cut into shards, of which each client gets some (McMahan et al., AISTATS 2017, section 3)."""

    per_client: int = 2

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise ValueError(f"per_client must be at least 1, not {self.per_client}")

    def divide(self, num_samples: int, num_clients: int, *, column: Column, seed: int) -> list[Tensor]:
        order = torch.as_tensor(column(LABEL)).argsort(stable=True)
        shards = _cut(order, [1.0] * (num_clients * self.per_client))
        dealt = _shuffled(len(shards), seed).view(num_clients, self.per_client).tolist()
        return [torch.cat([shards[shard] for shard in own]) for own in dealt]


@final
@dataclass(frozen=True)
class Replicated(Partition, name="replicated"):
    """Every client has all samples."""

    def divide(self, num_samples: int, num_clients: int, *, column: Column, seed: int) -> list[Tensor]:
        return [torch.arange(num_samples)] * num_clients


@final
@dataclass(frozen=True)
class Dirichlet(Partition, name="dirichlet"):
    """Each label is shared out in proportions drawn from a Dirichlet distribution (Yurochkin et al., ICML 2019,
    section 4). Drawn again until every client has `least` samples."""

    sizes_follow_values: ClassVar[bool] = True

    alpha: float = 0.5
    """The smaller, the fewer labels a client has."""
    least: int = 1

    def __post_init__(self) -> None:
        _require_positive("alpha", self.alpha)

    def divide(self, num_samples: int, num_clients: int, *, column: Column, seed: int) -> list[Tensor]:
        labels = torch.as_tensor(column(LABEL))
        of_label = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
        draws = random.Random(seed)

        def drawn() -> list[Tensor]:
            shares = [_drawn_shares(draws, self.alpha, num_clients) for _ in of_label]
            orders = [own[_shuffled(len(own), draws.getrandbits(62))] for own in of_label]
            parts = [_cut(order, own, least=0) for order, own in zip(orders, shares, strict=True)]
            return [torch.cat(own) for own in zip(*parts, strict=True)]

        return _drawn_until(drawn, self.least)


@final
@dataclass(frozen=True)
class Quantity(Partition, name="quantity"):
    """Shuffled, and cut into parts whose sizes are drawn from a Dirichlet distribution (Li et al., "Federated learning
    on non-IID data silos", ICDE 2022, section 4.3). Drawn again until every client has `least` samples."""

    alpha: float = 0.5
    """The smaller, the more sizes differ."""
    least: int = 1

    def __post_init__(self) -> None:
        _require_positive("alpha", self.alpha)

    def divide(self, num_samples: int, num_clients: int, *, column: Column, seed: int) -> list[Tensor]:
        draws, order = random.Random(seed), _shuffled(num_samples, seed)
        return _drawn_until(lambda: _cut(order, _drawn_shares(draws, self.alpha, num_clients), least=0), self.least)


@final
@dataclass(frozen=True)
class Linear(Partition, name="linear"):
    """Shuffled; the k-th client has k times as many samples as the first."""

    def divide(self, num_samples: int, num_clients: int, *, column: Column, seed: int) -> list[Tensor]:
        return _cut(_shuffled(num_samples, seed), range(1, num_clients + 1))


@final
@dataclass(frozen=True)
class Exponential(Partition, name="exponential"):
    """Shuffled; sizes grow by the same factor from client to client, and by `ratio` from the first to the last."""

    ratio: float = 100.0

    def __post_init__(self) -> None:
        _require_positive("ratio", self.ratio)

    def divide(self, num_samples: int, num_clients: int, *, column: Column, seed: int) -> list[Tensor]:
        factor = self.ratio ** (1 / max(1, num_clients - 1))
        return _cut(_shuffled(num_samples, seed), [factor**client for client in range(num_clients)])


@final
@dataclass(frozen=True)
class ByColumn(Partition, name="column"):
    """A client has all samples with one value of a column, such as who wrote them."""

    sizes_follow_values: ClassVar[bool] = True

    column: str

    def divide(self, num_samples: int, num_clients: int, *, column: Column, seed: int) -> list[Tensor]:
        return _by_value(column(self.column), num_clients, what=f"the column {self.column!r}")


@final
@dataclass(frozen=True)
class FromFile(Partition, name="file"):
    """A text file names each sample's client, one a line. Every machine reads its own copy."""

    path: str

    def divide(self, num_samples: int, num_clients: int, *, column: Column, seed: int) -> list[Tensor]:
        try:
            lines = Path(self.path).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read partition.path={self.path}: {error}") from None
        if len(lines) != num_samples:
            raise UsageError(f"{self.path} names {len(lines)} samples' clients, and there are {num_samples} samples")
        return _by_value(lines, num_clients, what=self.path)


def _by_value(values: Sequence[Any] | Tensor, num_clients: int, *, what: str) -> list[Tensor]:
    found: dict[Any, list[int]] = {}
    for index, value in enumerate(values.tolist() if isinstance(values, Tensor) else values):
        found.setdefault(value, []).append(index)
    if len(found) != num_clients:
        raise UsageError(f"{what} tells {len(found)} clients apart; use --option clients={len(found)}")
    return [torch.tensor(found[value]) for value in sorted(found, key=lambda value: (str(type(value)), value))]


def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _cut(order: Tensor, shares: Sequence[float], *, least: int = 1) -> list[Tensor]:
    """Parts in proportion to the shares, of at least so many samples each. Raises UsageError for too few samples."""
    if len(order) < least * len(shares):
        raise UsageError(f"{len(order)} samples cannot be divided into {len(shares)} parts; use fewer clients")
    total, reached, bounds = math.fsum(shares), 0.0, [0]
    for number, share in enumerate(shares, 1):
        reached += share
        last = len(order) - least * (len(shares) - number)
        bounds.append(min(last, max(bounds[-1] + least, round(len(order) * reached / total))))
    bounds[-1] = len(order)
    return [order[start:stop] for start, stop in itertools.pairwise(bounds)]


def _drawn_shares(draws: random.Random, alpha: float, count: int) -> list[float]:
    """Shares from a Dirichlet distribution. Where it is so uneven that no number is left above 0, one gets all."""
    shares = [draws.gammavariate(alpha, 1.0) for _ in range(count)]
    if not any(shares):
        shares[draws.randrange(count)] = 1.0
    return shares


def _drawn_until(draw: Callable[[], list[Tensor]], least: int) -> list[Tensor]:
    for _ in range(_MAX_DRAWS):
        parts = draw()
        if min(map(len, parts)) >= least:
            return parts
    raise UsageError(
        f"{_MAX_DRAWS} draws left some of {len(parts)} clients with fewer than {least} samples; "
        "use fewer clients, or a larger partition.alpha"
    )


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, not {value}")
