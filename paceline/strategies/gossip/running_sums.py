"""Push-sum that bears lost messages: each holds the sum of all that was ever sent, so that the next makes up for it.

Hadjicostis, Vaidya and Dominguez-Garcia, "Robust distributed average consensus via exchange of running sums", IEEE
Transactions on Automatic Control 61(6), 2016. Receivers take the difference to what they had from the sender last.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor

from paceline.layout import Layout
from paceline.strategies.gossip.mixer import Mixer
from paceline.strategies.gossip.parcel import Parcel
from paceline.strategies.gossip.push_sum import push, share
from paceline.topology import Topology


def in_double(layout: Layout) -> Layout:
    """The same tensors in float64 or complex128, for sums that grow with every step."""
    segments, start_bytes = [], 0
    for segment in layout.segments:
        dtype = torch.promote_types(segment.dtype, torch.float64)
        segments.append(replace(segment, dtype=dtype, start_bytes=start_bytes))
        start_bytes += segments[-1].num_bytes
    return Layout(tuple(segments), start_bytes)


@final
class RunningSums(Mixer):
    """The own parcel's values are x / w; the parcels that travel hold sums of x, and of w as their number."""

    why_uncoded: ClassVar[str] = "sends sums that grow with every step, and what a codec leaves out of them with these"
    message_size: ClassVar[float] = 2.0

    def __init__(self, topology: Topology, own: Parcel, *, rank: int, size: int) -> None:
        super().__init__(topology, own, rank=rank, size=size)
        self._weight = torch.ones(1, dtype=torch.float64)
        self._layout = in_double(own.layout)
        self._dtypes = [segment.dtype for segment in self._layout.segments]
        self._begin()

    def _begin(self) -> None:
        """Nothing was sent over any link yet."""

        def one_each(others: Iterable[int]) -> dict[int, Parcel]:
            return {other: Parcel(self._layout, self.own.buffer.device) for other in sorted({*others})}

        steps = [self.near(step) for step in range(self.topology.period(self.size))]
        receivers = {other for near in steps for other in near.sends_to}
        senders = {other for near in steps for other in near.receives_from}
        self._sums, self._leaving = one_each(receivers), one_each(receivers)
        self._came, self._coming = one_each(senders), one_each(senders)

    @property
    def weight(self) -> float:
        return float(self._weight)

    def outgoing(self, step: int) -> Mapping[int, Parcel]:
        given = self.weight * share(self.topology, step, self.rank, self.size)
        leaving = {receiver: self._leaving[receiver] for receiver in self.near(step).sends_to}
        for receiver, parcel in leaving.items():
            parcel.buffer.copy_(self._sums[receiver].buffer)
            parcel.number += given
            for total, values in zip(parcel.values, self.own.values, strict=True):
                total.add_(values, alpha=given)
        return leaving

    def incoming(self, step: int) -> Mapping[int, Parcel]:
        return {sender: self._coming[sender] for sender in self.near(step).receives_from}

    def mix(self, step: int, lost: Collection[int] = ()) -> None:
        near = self.near(step)
        for receiver in near.sends_to:
            self._sums[receiver].buffer.copy_(self._leaving[receiver].buffer)
        kept = weight = self.weight * share(self.topology, step, self.rank, self.size)
        totals = [values.to(dtype) * kept for values, dtype in zip(self.own.values, self._dtypes, strict=True)]
        for sender in sorted(near.receives_from.keys() - set(lost)):
            came, coming = self._came[sender], self._coming[sender]
            weight += coming.number - came.number
            for total, now, before in zip(totals, coming.values, came.values, strict=True):
                total.add_(now).sub_(before)
            came.buffer.copy_(coming.buffer)
        for values, total in zip(self.own.values, totals, strict=True):
            values.copy_(total.div_(weight))
        self._weight.fill_(weight)

    def regroup(self, rank: int, size: int) -> None:
        """As push-sum, over links that begin anew."""
        super().regroup(rank, size)
        self._weight.fill_(1.0)
        self._begin()

    def update(self, step: Callable[[], object]) -> None:
        push(self.own, self.weight, step)

    def state(self) -> dict[str, Tensor]:
        sums = {f"sums.{receiver}": parcel.buffer for receiver, parcel in self._sums.items()}
        came = {f"came.{sender}": parcel.buffer for sender, parcel in self._came.items()}
        return {"weight": self._weight, **sums, **came}
