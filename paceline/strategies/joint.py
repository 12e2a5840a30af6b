"""Robust aggregation among workers: everyone gets everyone's values of its own part, joins them, and sends the result.

So as many bytes move as an all-reduce would move. What compares whole contributions adds up the parts' Gram matrices.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import final

import torch
from torch import Tensor

from paceline.aggregate import Aggregator, Contribution, counted, gram_of, require_joined
from paceline.buckets import Bucket
from paceline.codec.joining import Peers
from paceline.comm.base import Finished, Work
from paceline.errors import UsageError
from paceline.strategies.own_state import OwnState

AGGREGATE_DOC = "how gradients are joined: mean, or what hostile workers cannot lead away, such as krum or trimmed-mean"
_SUMS = "exchange.sums"


@final
class JointExchange:
    """Joins the values of buckets that all workers have started, when the first of them is waited for.

    Args:
        senders: the ranks of these workers, in the order of their places.
    """

    def __init__(self, aggregator: Aggregator, peers: Peers, *, senders: Sequence[int]) -> None:
        self._aggregator, self._peers, self._senders = aggregator, peers, senders
        self._started: list[tuple[Sequence[float], Tensor]] = []
        self.weights: Sequence[float] = ()
        """Of what these workers start next, the same on all; none: each has 1."""
        self._sums = torch.zeros(0, dtype=torch.float64)
        """What each worker has contributed to this worker's part so far, one a row, if the aggregator remembers."""

    def starting(self, bucket: Bucket, average_flags: Callable[[], Work]) -> Callable[[], Work]:
        """What starts this bucket's exchange, each time it is called."""
        if bucket.values.dtype.is_complex:
            raise UsageError(f"aggregate={self._aggregator} takes real gradients, and some parameters are complex")

        def start() -> Work:
            self._started.append((self.weights or [1.0] * self._peers.size, bucket.values))
            return _Joined(self, average_flags() if bucket.flags.numel() else Finished())

        return start

    def finish(self) -> None:
        started, self._started = self._started, []
        for weights, of_these in groupby(started, key=itemgetter(0)):
            self._join([values for _, values in of_these], weights)

    def own_state(self) -> dict[str, OwnState]:
        return {_SUMS: OwnState(self._sums, "reset")} if self._aggregator.remembers else {}

    def restore(self, own: Mapping[str, Tensor]) -> None:
        self._sums = own.get(_SUMS, self._sums)

    def _join(self, values: Sequence[Tensor], weights: Sequence[float]) -> None:
        peers = self._peers
        parts = [torch.tensor_split(each, peers.size) for each in values]
        outgoing = [_bytes_of([part[rank] for part in parts]) for rank in range(peers.size)]
        own = [part[peers.rank] for part in parts]
        raws = peers.start_all_to_all(outgoing, [outgoing[peers.rank].numel()] * peers.size)()
        given = counted(
            self._aggregator,
            [
                Contribution(sender, weight, "gradient", _read(raw, own))
                for sender, weight, raw in zip(self._senders, weights, raws, strict=True)
            ],
        )
        require_joined(self._aggregator, given)
        joined = self._aggregator.aggregate(given, [_wide(part) for part in own], gram=self._gram(given))
        result = [tensor.to(part.dtype) for tensor, part in zip(joined, own, strict=True)]
        raws = peers.start_all_to_all([_bytes_of(result)] * peers.size, [raw.numel() for raw in outgoing])()
        for rank, raw in enumerate(raws):
            theirs = [part[rank] for part in parts]
            for target, tensor in zip(theirs, _read(raw, theirs), strict=True):
                target.copy_(tensor)

    def _gram(self, given: Sequence[Contribution]) -> Tensor | None:
        """Inner products of whole contributions, or of the sums of all that each worker has sent; none where nobody
        looks at them."""
        if self._aggregator.is_coordinate_wise:
            return None
        if self._aggregator.remembers:
            rows = torch.stack([torch.cat([tensor.double() for tensor in each.tensors]) for each in given])
            self._sums = rows + (self._sums.to(rows.device) if self._sums.numel() else 0.0)
            given = [each._replace(tensors=[row]) for each, row in zip(given, self._sums, strict=True)]
        gram = gram_of(given)
        self._peers.average(gram)
        return gram * self._peers.size


@final
class _Joined(Work):
    def __init__(self, exchange: JointExchange, flags: Work) -> None:
        self._exchange, self._flags = exchange, flags

    def poll(self) -> bool:
        self._flags.poll()
        return False

    def wait(self) -> None:
        self._flags.wait()
        self._exchange.finish()


def require_joint(aggregate: Aggregator, num_workers: int) -> None:
    """Raises UsageError, which names the option, where so many workers' contributions cannot be joined."""
    try:
        aggregate.require(num_workers)
    except ValueError as error:
        raise UsageError(f"aggregate={aggregate}: {error}; a worker gives one to each update") from None


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors])


def _read(raw: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `_bytes_of`, for tensors like these."""
    pieces = raw.split([tensor.nbytes for tensor in like])
    # Copies lie where their dtype may lie.
    return [piece.clone().view(tensor.dtype) for piece, tensor in zip(pieces, like, strict=True)]


def _wide(part: Tensor) -> Tensor:
    """Memory to join in."""
    is_half = part.dtype in (torch.float16, torch.bfloat16)
    return torch.empty_like(part, dtype=torch.float32 if is_half else part.dtype)
