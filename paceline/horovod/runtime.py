"""This process's place among the others, and its process sets."""

import atexit
import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from paceline.comm.base import Collective
from paceline.comm.connecting import connect_some
from paceline.engines import torchrun
from paceline.engines.world import World, alone, current, enter
from paceline.errors import DeadlineExceeded, PeerLost, UsageError
from paceline.horovod import line as lines
from paceline.horovod import reporting, worker_line
from paceline.horovod.channel import Channel
from paceline.horovod.elastic_jobs.joining import join as join_elastic
from paceline.horovod.ledger import Ledger
from paceline.horovod.operation import Operation
from paceline.horovod.recording import Recorder, Standing
from paceline.horovod.requests import MEETING, Request
from paceline.horovod.settings import Settings
from paceline.horovod.timeline import Timeline
from paceline.strategies.horovod import Horovod

GLOBAL = 0
"""The process set of all ranks."""


class _Counters(NamedTuple):
    """How many operations without a name there have been; replaced as a whole, as other threads may be counting."""

    num_joins: int
    """How often all ranks have joined."""
    by_kind: dict[tuple[int, str], Iterator[int]]
    """Since then, by process set and kind."""


@final
class Runtime:
    """What lives from `init` to `shutdown` on one rank."""

    def __init__(self, world: World, *, settings: Settings) -> None:
        """Collective call of all workers."""
        context = world.context
        self.rank, self.size = context.rank, context.size
        self.local_rank, self.local_size = context.local_rank, context.local_size
        self.settings, self.timeline = settings, Timeline()
        if settings.timeline is not None and self.rank == 0:
            self.timeline.start(settings.timeline, marks_cycles=settings.marks_cycles)
        self._world = world
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._channels: dict[int, Channel] = {}
        self._num_sets = 0
        self._counters = _Counters(0, {})
        collective = context.collective
        collective.require_equal("HOROVOD_FUSION_THRESHOLD", settings.fusion_bytes)
        collective.require_equal("HOROVOD_CACHE_CAPACITY", settings.num_remembered)
        said = collective.all_gather_object((self.local_rank, self.local_size))
        firsts = [local_rank for local_rank, _ in said]
        self.cross_size = sum(each == self.local_rank for each in firsts)
        """Hosts that have a worker of this worker's number on its host."""
        self.cross_rank = sum(each == self.local_rank for each in firsts[: self.rank])
        self.is_homogeneous = len({local_size for _, local_size in said}) == 1
        # The launcher has said so: what ranks of other hosts say of themselves could be anybody's word.
        self.is_one_host = world.store is None or self.size == self.local_size
        self._enter_set(tuple(range(self.size)), via=collective)

    def channel(self, process_set_id: int | None) -> Channel:
        """The operations of a process set. Raises ValueError if this rank is not of it, or there is none."""
        try:
            return self._channels[process_set_id]  # type: ignore[index]  # None is none of them
        except KeyError:
            raise ValueError(self._why_not(process_set_id)) from None

    def _why_not(self, process_set_id: int | None) -> str:
        if process_set_id is None or process_set_id not in self._ranks:
            return "the process set has not been initialized: pass it to init or add_process_set"
        return (
            f"rank {self.rank} does not belong to process set {process_set_id}, whose ranks are "
            f"{list(self._ranks[process_set_id])}"
        )

    def ranks_of(self, process_set_id: int) -> tuple[int, ...]:
        return self._ranks[process_set_id]

    @property
    def process_sets(self) -> dict[int, tuple[int, ...]]:
        return dict(self._ranks)

    def add_set(self, ranks: Sequence[int]) -> int | None:
        """Make a process set; its number, or None if there is one of these ranks. Collective call of all workers.

        Raises:
            ValueError: a rank is none.
        """
        wanted = tuple(sorted(ranks))
        unknown = [rank for rank in wanted if not 0 <= rank < self.size]
        if unknown or len(set(wanted)) < len(wanted) or not wanted:
            raise ValueError(f"a process set takes ranks from 0 to {self.size - 1}, each once, not {list(ranks)}")
        if wanted in self._ranks.values():
            return None
        name = f"add process set {list(wanted)}"
        number: int = self._meet(name, lambda collective: self._enter_set(wanted, via=collective))
        return number

    def remove_set(self, process_set_id: int) -> int | None:
        """End a process set; its number, or None if there is none. Collective call of all workers."""
        if process_set_id not in self._ranks or process_set_id == GLOBAL:
            return None

        def leave(collective: Collective) -> None:
            self._ranks.pop(process_set_id)
            channel = self._channels.pop(process_set_id, None)
            if channel is not None:
                channel.close()

        self._meet(f"remove process set {process_set_id}", leave)
        return process_set_id

    def count(self, process_set_id: int | None, kind: str) -> str:
        """What to call an operation without a name: ranks that ask for the same in the same order call it the same.

        Threads that ask at once get a name each.
        """
        num_joins, counters = self._counters
        count = next(counters.setdefault((process_set_id or GLOBAL, kind), itertools.count(1)))
        return f"{num_joins}.{count}" if num_joins else str(count)

    def recount(self) -> None:
        """All ranks have joined: what they have asked for may differ, and what they ask for next is the same again."""
        self._counters = _Counters(self._counters.num_joins + 1, {})

    def close(self) -> None:
        for process_set_id in sorted(self._channels, reverse=True):
            self._channels.pop(process_set_id).close()
        self.timeline.stop()

    def _meet(self, name: str, run: Any) -> Any:
        channel = self._channels[GLOBAL]
        operation = Operation(Request(MEETING, name, is_lasting=False), run=run)
        channel.submit(operation)
        channel.wait(operation)
        return operation.result

    def _enter_set(self, ranks: tuple[int, ...], *, via: Collective) -> int:
        number = self._num_sets
        self._num_sets += 1
        self._ranks[number] = ranks
        collective = connect_some(
            ranks,
            via=via,
            store=self._world.store,
            name=_next_name(),
            device=self._world.context.device,
        )
        if collective is not None:
            self._channels[number] = Channel(
                collective,
                ranks,
                settings=self.settings,
                timeline=self.timeline,
                ledger=_ledger,
                name=f"process set {number}",
                is_crowded=self.is_one_host and len(ranks) >= len(os.sched_getaffinity(0)),
            )
        return number


_ledger = Ledger()
_recorder: Recorder | None = None
"""The recorder of this process's run, however often the script calls `init`."""
_runtime: Runtime | None = None
_own_world: World | None = None
"""The world that `init` itself has met in."""
_num_connected = 0


def _next_name() -> str:
    """A name that no other process set has; the same on all ranks, which make all sets together."""
    global _num_connected
    _num_connected += 1
    return f"horovod {_num_connected}"


def runtime() -> Runtime:
    """What `init` has begun. Raises ValueError before it, or after `shutdown`."""
    if _runtime is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _runtime


def is_initialized() -> bool:
    return _runtime is not None


def init() -> Runtime:
    """Meet all workers of the run, of torchrun's world, or of a world of one. A second call does nothing."""
    global _runtime, _own_world
    if _runtime is None:
        worker_line.connect()
        world, line = current(), lines.current()
        if line is not None:
            _runtime = _meet_anew(line)
            return _runtime
        if world is None:
            world = _recorded(_join() if "TORCHELASTIC_RUN_ID" in os.environ else alone())
            enter(world)
            atexit.register(end)
            _own_world = world
        else:
            _end_with(world)
        if world.context.pacing.is_simulated:
            raise UsageError("Horovod's scripts run in real processes; use --engine ray")
        _runtime = Runtime(world, settings=Settings.read())
        _record(world, Standing())
    return _runtime


def _recorded(world: World) -> World:
    """As it is to be where a launcher keeps records."""
    reporter = reporting.current()
    return world if reporter is None else replace(world, strategy=Horovod(), reporter=reporter)


def _record(world: World, standing: Standing) -> None:
    """Record this rank's steps from here on, if the run was started for that."""
    global _recorder
    if world.strategy.traits.by_script and _recorder is None:
        _recorder = Recorder(world, _ledger.timing, standing)


def recorder() -> Recorder | None:
    """Who records this rank's steps; nobody, unless the run was started for that."""
    return _recorder


def shutdown() -> None:
    """End all operations of this rank; `init` may follow. What the others have under way fails."""
    global _runtime
    if _runtime is not None:
        ending, _runtime = _runtime, None
        ending.close()
        if lines.current() is not None:
            _leave()


def _meet_anew(line: lines.Line) -> Runtime:
    """Meet in the next membership of an elastic job."""
    global _own_world
    atexit.unregister(end)
    atexit.register(end)
    while True:
        try:
            met_in, furthest = join_elastic(line, Standing() if _recorder is None else _recorder.standing)
            _own_world = _recorded(met_in)
            enter(_own_world)
            met = Runtime(_own_world, settings=Settings.read())
            _record(_own_world, furthest)
            return met
        except (PeerLost, DeadlineExceeded):  # one of them has died meanwhile
            _leave()


def _end_with(world: World) -> None:
    if shutdown not in world.at_end:
        world.at_end.append(shutdown)


def _join() -> World:
    """The world of torchrun's variables, which Horovod's own may give less time to meet."""
    limit_s = os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS")
    return torchrun.join(seed=0, deadline_s=float(limit_s)) if limit_s else torchrun.join(seed=0)


def end() -> None:
    """Shut down, and leave the world that `init` has met; nothing where an engine has started this process."""
    if _own_world is not None:
        with contextlib.suppress(Exception):
            shutdown()
        _leave()


def _leave() -> None:
    global _own_world
    world, _own_world = _own_world, None
    if world is not None:
        world.context.collective.close()
        enter(None)
