"""Between a bucket of values and the wire: encode, move, decode, join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from paceline.buckets import Bucket
from paceline.codec import Codec, Payload
from paceline.comm.algorithms import ALGORITHMS, AlgorithmWork
from paceline.comm.base import Collective, Work


@final
class Exchange:
    """Averages buckets over all workers, in place.

    A codec sees the values alone. Flags are averaged as they are: without a codec in the same operation, since they
    lie behind the values, and otherwise in one of their own.

    Args:
        buckets: one layout on every worker.
        algorithm: `auto`, or one of those over send and receive.
        codec: what encodes values; none: they travel as they are.
    """

    def __init__(
        self, collective: Collective, buckets: Sequence[Bucket], *, algorithm: str = "auto", codec: Codec | None = None
    ) -> None:
        average = averaging(collective, algorithm)
        if codec is None:
            self._starts = [average(bucket.flat) for bucket in buckets]
        else:
            self._starts = [_Coded(collective, bucket, codec, average).start for bucket in buckets]

    def start(self, bucket: int) -> Work:
        """One of a bucket must be over before the next is started."""
        return self._starts[bucket]()


def averaging(collective: Collective, algorithm: str) -> Callable[[Tensor], Callable[[], Work]]:
    """What prepares a tensor, and gives what averages it in place over all workers, each time it is called."""
    if algorithm == "auto":
        return lambda flat: collective.persistent_all_reduce(flat, op="mean")
    reduce = ALGORITHMS[algorithm]
    return lambda flat: lambda: AlgorithmWork(collective, reduce, flat, op="mean")


@final
class _Coded(Work):
    """One bucket's average through a codec. Nothing but `wait` decodes."""

    def __init__(
        self,
        collective: Collective,
        bucket: Bucket,
        codec: Codec,
        average: Callable[[Tensor], Callable[[], Work]],
    ) -> None:
        self._collective, self._bucket, self._codec = collective, bucket, codec
        self._average = average
        self._average_flags = average(bucket.flags)
        self._memory = codec.start(bucket.values)
        self._payload: Payload = ()
        self._works: list[Work] = []

    def start(self) -> Work:
        self._payload, self._memory = self._codec.encode(self._bucket.values, self._memory)
        self._works = [self._average_flags()]
        if self._codec.linear:
            self._works += [self._average(tensor)() for tensor in self._payload]
        return self

    def poll(self) -> bool:
        for work in self._works:
            work.poll()
        return not self._works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._works:
            self._bucket.values.copy_(self._joined())
            self._works = []

    def _joined(self) -> Tensor:
        values = self._bucket.values
        if self._codec.linear:
            return self._codec.decode(self._payload, values)
        gathered = [self._collective.all_gather(tensor) for tensor in self._payload]
        everyone = [self._codec.decode(payload, values) for payload in zip(*gathered, strict=True)]
        total = everyone[0]
        for decoded in everyone[1:]:
            total += decoded
        return total.div_(len(everyone))
