"""What lies between a bucket of values and the wire: encode, move, decode, join."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

from torch import Tensor

from paceline.aggregate import MEAN, Aggregator
from paceline.arrays import is_finite
from paceline.buckets import NONFINITE, Bucket
from paceline.codec import Codec, TensorCodec
from paceline.codec.costs import Speed, coding_s
from paceline.codec.joining import Keeping, Kept, Region, beginnings, handed_on, join, join_all
from paceline.comm.algorithms import ALGORITHMS, AlgorithmWork
from paceline.comm.base import Collective, Timing, Work
from paceline.comm.works import WhenWaitedFor
from paceline.layout import Layout
from paceline.strategies.coding import Coding, require_real
from paceline.strategies.joint import JointExchange
from paceline.strategies.own_state import Fate, OwnState

_FATES: Mapping[str, Fate] = {"left": "average", "part": "reset", "q": "average"}


@final
class Exchange:
    """Averages buckets over all workers, or joins them by another aggregator, in place.

    A codec sees the values alone. Flags are averaged as they are: without a codec in the same operation, since they
    lie behind the values, and otherwise in one of their own.

    Args:
        buckets: one layout on every worker.
        algorithm: `auto`, or one of those over send and receive.
        coding: what encodes values; none: they travel as they are.
        layout: of the buckets, for codecs that look at tensors in their shapes.
        timing: where to count what coding takes.
        aggregator: joins the values; one that does not stream does so when works are waited for, with no codec.
        senders: the workers' ranks, in the order of their places; none: their places.
    """

    def __init__(
        self,
        collective: Collective,
        buckets: Sequence[Bucket],
        *,
        algorithm: str = "auto",
        coding: Coding | None = None,
        layout: Layout | None = None,
        timing: Timing | None = None,
        aggregator: Aggregator = MEAN,
        senders: Sequence[int] = (),
    ) -> None:
        self.timing = timing or Timing()
        """What coding takes."""
        self._coded: list[_Coded] = []
        self._joint = JointExchange(aggregator, Messages(collective), senders=senders or range(collective.size))
        self._goes_by_messages = coding is not None or algorithm != "auto" or not aggregator.streams
        average = averaging(collective, algorithm)
        looks = algorithm == "auto" and coding is None and aggregator.streams
        watched = [collective.watched_mean(bucket.flat) for bucket in buckets] if looks else []
        self.is_watched = bool(watched) and None not in watched
        """Whether works tell where a mean is not finite."""
        if self.is_watched:
            self._starts = [start for start in watched if start is not None]
        elif not aggregator.streams:
            self._starts = [self._joint.starting(bucket, average(bucket.flags)) for bucket in buckets]
        elif coding is None:
            self._starts = [average(bucket.flat) for bucket in buckets]
        else:
            self._coded = [
                _Coded(collective, bucket, coding, average, self.timing, index=index, layout=layout)
                for index, bucket in enumerate(buckets)
            ]
            self._starts = [coded.start for coded in self._coded]
        self.is_coded = bool(self._coded)
        """Whether a codec encodes values."""

    @property
    def completes_alike(self) -> bool:
        """Whether on one host all have what comes of an exchange, or nobody. Where values go by messages from worker to
        worker, one may have it when another lacks a dead one's."""
        return not self._goes_by_messages

    def start(self, bucket: int, *, step: int = 0, weights: Sequence[float] = ()) -> Work:
        """One of a bucket must be over before the next is started.

        Args:
            weights: each worker's, the same on all, where some may have none: an aggregator that looks at contributions
                one by one is given those that have; none: all have.
        """
        if self._coded:
            self._coded[bucket].step = step
        self._joint.weights = weights
        return self._starts[bucket]()

    def settle(self, *, is_applied: bool) -> None:
        """All buckets' means are there. What is left out of a gradient that nobody applies is not to come later."""
        for coded in self._coded:
            coded.settle(is_applied=is_applied)

    def carry_on(self, before: "Exchange") -> None:
        """Among other workers than `before`, of the same buckets: what its codec has left out is still owed. What a
        codec has alike on all workers begins anew, on all."""
        for coded, earlier in zip(self._coded, before._coded, strict=False):  # none where nothing is, or was, coded
            coded.carry_on(earlier)

    @property
    def owes(self) -> bool:
        """Whether its codec may have left out something that is not lost while this worker stays."""
        return any(coded.owes for coded in self._coded)

    def own_state(self) -> dict[str, OwnState]:
        """What codecs keep for the next exchange. Averaged, what was left out changes the next mean as much."""
        return {
            f"exchange.{index}.{name}": OwnState(tensor, _FATES[name])
            for index, coded in enumerate(self._coded)
            for name, tensor in coded.kept.items()
        } | self._joint.own_state()

    def restore(self, own: Mapping[str, Tensor]) -> None:
        """Take up what `own_state` gave, as far as it is there and fits."""
        self._joint.restore(own)
        for index, coded in enumerate(self._coded):
            given = {name: own.get(f"exchange.{index}.{name}", now) for name, now in coded.kept.items()}
            coded.kept = {
                name: given[name].to(now.device) if given[name].shape == now.shape else now
                for name, now in coded.kept.items()
            }


def averaging(collective: Collective, algorithm: str) -> Callable[[Tensor], Callable[[], Work]]:
    """What prepares a tensor, and gives what averages it in place over all workers, each time it is called."""
    if algorithm == "auto":
        return lambda flat: collective.persistent_all_reduce(flat, op="mean")
    reduce = ALGORITHMS[algorithm]
    return lambda flat: lambda: AlgorithmWork(collective, reduce, flat, op="mean")


class _Share(NamedTuple):
    """The part of a bucket that this worker codes, and its place in the group that averages this part."""

    regions: Mapping[Codec, Sequence[Region]]
    rank: int
    size: int


@final
class _Coded(Work):
    """One bucket's average through a codec, which runs when it is waited for: of several, in the same order on all
    workers. Its flags are under way from the start, and so is the notice of workers that are to leave. Where there is
    one, the exchange goes without the codec, with all that anybody owes: who leaves could send that no more, and what
    hosts have left out together would belong to nobody."""

    def __init__(
        self,
        collective: Collective,
        bucket: Bucket,
        coding: Coding,
        average: Callable[[Tensor], Callable[[], Work]],
        timing: Timing,
        *,
        index: int,
        layout: Layout | None,
    ) -> None:
        require_real(coding.codec, bucket.values.dtype)
        self.step = 0
        self.kept: Kept = {}
        self._bucket, self._coding, self._timing, self._index = bucket, coding, timing, index
        self._segment = layout.segments[index] if layout is not None else None
        self._pending: Keeping = {}
        self._share: _Share | None = None
        self._flags: Work | None = None
        self._average_flags = average(bucket.flags) if bucket.flags.numel() else _nothing
        owes = any(codec is not None and codec.feedback for codec in (coding.before, coding.codec))
        self._leaves = coding.leaves if owes else None
        self._notice = bucket.values.new_zeros(1)
        self._notices: Work = _nothing()
        self._average_notice = _nothing if self._leaves is None else average(self._notice)
        self._carries_all = False  # the last exchange did
        is_whole = coding.codec.shaped or (coding.before is not None and coding.before.shaped)
        if coding.among_hosts:
            self._average = collective.mean_across(bucket.values, self._prepare, is_whole=is_whole)
        else:
            self._average = self._prepare(collective, bucket.values)

    def start(self) -> Work:
        self._flags = self._average_flags()
        if self._leaves is not None:
            self._notice.fill_(float(self._leaves()))
        self._notices = self._average_notice()
        return self

    def poll(self) -> bool:
        if self._flags is not None:
            self._flags.poll()
            self._notices.poll()
        return self._flags is None

    def wait(self) -> None:
        if self._flags is None:
            return
        self._flags.wait()
        self._notices.wait()
        self._carries_all = bool(self._notice > 0)
        self._average().wait()
        if self._segment is not None:
            self._segment.zero_padding(self._bucket.values)
        flags = self._bucket.flags
        # A codec may not hold what was finite; all workers have the same mean, and so decide alike.
        if flags.numel() and not is_finite(self._bucket.values):
            flags[NONFINITE] = 1.0
        self._flags = None

    def settle(self, *, is_applied: bool) -> None:
        if is_applied and self._pending:
            self.kept = self._pending
        self._pending = {}
        self._carries_all = self._carries_all and is_applied

    @property
    def owes(self) -> bool:
        return self._leaves is not None and not self._carries_all

    def carry_on(self, before: "_Coded") -> None:
        codec, share = self._coding.codec, before._share
        if share is None or self._coding.place != before._coding.place or "left" not in self.kept:
            return
        last = before._coding.before if isinstance(before._coding.before, TensorCodec) else codec
        left = handed_on(before.kept, last, share.regions[last], rank=share.rank, size=share.size)["left"]
        if left.shape == self.kept["left"].shape:
            self.kept = {**self.kept, "left": left}

    def _prepare(self, group: Collective, flat: Tensor) -> Callable[[], Work]:
        """What averages a tensor over a group, each time it is called."""
        coding = self._coding
        regions = {codec: self._regions(codec, flat) for codec in (coding.before, coding.codec) if codec is not None}
        # What one codec leaves out, the next one takes up.
        self.kept = {
            name: tensor
            for codec, each in regions.items()
            for name, tensor in beginnings(
                codec, each, flat, rank=group.rank, size=group.size, seed=coding.seed
            ).items()
        }
        self._share = _Share(regions, group.rank, group.size)
        return lambda: WhenWaitedFor(lambda: self._join(group, flat, regions))

    def _regions(self, codec: Codec, flat: Tensor) -> Sequence[Region]:
        if codec.shaped and self._segment is not None:
            return [Region(slot.offset, slot.spec.shape) for slot in self._segment.slots]
        return [Region(0, (flat.numel(),))]

    def _join(self, group: Collective, flat: Tensor, regions: Mapping[Codec, Sequence[Region]]) -> None:
        coding, peers = self._coding, Messages(group)
        codec = coding.codec if self.step >= coding.codec.first_step else coding.before
        if codec is None:
            peers.average(flat)
            return
        pacing = coding.pacing
        began_s, before_s = pacing.now_s(), _exchanged_s(group)
        path = (self.step, self._index)
        kept = self.kept
        if codec is coding.codec and isinstance(coding.before, TensorCodec):
            kept = handed_on(kept, coding.before, regions[coding.before], rank=group.rank, size=group.size)
        self._pending = {**kept}
        if self._carries_all:
            join_all(codec, peers, flat, kept, self._pending, regions=regions[codec])
            return
        join(codec, peers, flat, kept, self._pending, regions=regions[codec], path=path, seed=coding.seed)
        speed, shapes = Speed.said(codec, operation_s=pacing.operation_s), [region.shape for region in regions[codec]]
        pacing.spend(coding_s(codec, flat.numel(), group.size, speed=speed, shapes=shapes))
        self._timing.communication_s += pacing.now_s() - began_s - (_exchanged_s(group) - before_s)


@final
class Messages:
    """A collective as codecs and aggregators need it."""

    def __init__(self, group: Collective) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group

    def average(self, tensor: Tensor) -> None:
        self._group.all_reduce(tensor, op="mean").wait()

    def start_all_to_all(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """By messages where that is possible: sizes are known, and nobody need be told; over gloo 8 MB each way take
        9 ms, and its own all-to-all 47 ms."""
        if not self._group.can_receive_first:
            found = self._group.all_to_all(tensors)
            return lambda: found
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        found = [tensors[rank].new_empty(size) for rank, size in enumerate(sizes)]
        found[self.rank] = tensors[self.rank]
        works = [self._group.recv(found[rank], source=rank) for rank in reversed(others) if sizes[rank]]
        works += [self._group.send(tensors[rank], destination=rank) for rank in others if tensors[rank].numel()]

        def arrived() -> list[Tensor]:
            for work in works:
                work.wait()
            return found

        return arrived


def _nothing() -> Work:
    return WhenWaitedFor(lambda: None)


def _exchanged_s(group: Collective) -> float:
    return group.timing.communication_s + group.timing.waiting_s
