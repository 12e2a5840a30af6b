"""Between a bucket of values and the wire: encode, move, decode, join."""

from collections.abc import Callable, Mapping, Sequence
from typing import final

from torch import Tensor

from paceline.buckets import NONFINITE, Bucket
from paceline.codec import Codec, Payload
from paceline.comm.algorithms import ALGORITHMS, AlgorithmWork
from paceline.comm.base import Collective, Work
from paceline.strategies.own_state import OwnState


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
        self._coded: list[_Coded] = []
        average = averaging(collective, algorithm)
        watched = [collective.watched_mean(bucket.flat) for bucket in buckets] if algorithm == "auto" else []
        self.is_watched = codec is None and bool(watched) and None not in watched
        """Whether works tell where a mean is not finite."""
        if self.is_watched:
            self._starts = [start for start in watched if start is not None]
        elif codec is None:
            self._starts = [average(bucket.flat) for bucket in buckets]
        else:
            self._coded = [_Coded(collective, bucket, codec, average) for bucket in buckets]
            self._starts = [coded.start for coded in self._coded]

    def start(self, bucket: int) -> Work:
        """One of a bucket must be over before the next is started."""
        return self._starts[bucket]()

    def own_state(self) -> dict[str, OwnState]:
        """What codecs keep for the next exchange. Averaged, it changes the next mean as much."""
        kept = {f"exchange.{index}": coded.memory for index, coded in enumerate(self._coded)}
        return {name: OwnState(memory, "average") for name, memory in kept.items() if memory is not None}

    def restore(self, own: Mapping[str, Tensor]) -> None:
        """Take up what `own_state` gave, as far as it is there."""
        for index, coded in enumerate(self._coded):
            coded.memory = own.get(f"exchange.{index}", coded.memory)


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
        self.memory = codec.start(bucket.values)
        self._next_memory: Tensor | None = None
        self._payload: Payload = ()
        self._works: list[Work] = []

    def start(self) -> Work:
        self._payload, self._next_memory = self._codec.encode(self._bucket.values, self.memory)
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
            is_finite = not self._bucket.flags.numel() or float(self._bucket.flags[NONFINITE].real) == 0
            if is_finite:  # what is left out of a gradient that nobody applies is not to come later
                self.memory = self._next_memory
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
