"""How long a script's own steps take on each host, while nothing is exchanged."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.engines.ray.nodes import own_address
from paceline.engines.scripting import Script, run_program
from paceline.engines.world import World, current
from paceline.errors import BudgetReached, UsageError
from paceline.records import EventRecord
from paceline.server.tables.table import Table
from paceline.strategies.base import Context, Strategy, Synchronizer
from paceline.strategies.pacing import Pacing
from paceline.strategies.replica import Replica
from paceline.strategies.several import require_one_of_each
from paceline.strategies.single import Single
from paceline.strategies.traits import Traits

EVENT = "measured"
MIN_STEPS = 3
_NUM_WARMUP = 2  # steps left out: the first ones find cold caches, and allocate


@final
@dataclass(frozen=True, kw_only=True)
class Apart(Strategy):
    """Every worker trains its own copy, as if it were alone: steps without an exchange, on all hosts at a time."""

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=False, unit="gradient", tells_stop=True, holds_rows=True, traffic=())

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return Single(nonfinite=self.nonfinite).bind(context, replica)


@dataclass(frozen=True)
class StepReport:
    """One worker's steps, those that warm up left out. Times are of one forward and backward pass with what belongs
    to it: batch, optimizer step, the script's own Python."""

    address: str
    steps_s: tuple[float, ...]
    backward_share: float
    gradient_shares: tuple[float, ...]
    """The part of the backward pass that each gradient takes, in the order of the optimizer's parameters."""


class _Enough(BudgetReached):
    """The script has been looked at for long enough."""


@final
class StepWatch(Pacing):
    """Times the steps of a model, told apart by the optimizer's. What the virtual engine takes anew is not counted: the
    time that a script asks to sleep, and that in which rows of tables are read and updated, as servers do. Ends the
    script after `num_steps`, or after `max_s` with enough of them."""

    def __init__(self, *, num_steps: int, max_s: float, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._num_steps, self._max_s, self._now_s = num_steps, max_s, now_s
        self._left_out_s = 0.0
        self._began_s: float | None = None
        self._step_began_s = 0.0
        self._backward_began_s = 0.0
        self._num_passes = 0
        self._backward_s = 0.0
        self._ready_s: dict[int, float] = {}
        self._steps_s: list[float] = []
        self._shares: list[float] = []
        self._parts_s: list[list[float]] = []
        self._num_parameters = 0

    def now_s(self) -> float:
        return self._now_s()

    def watch(self, replica: Replica) -> None:
        require_one_of_each(replica, "probing")
        self._num_parameters = len(replica.parameters)
        replica.model.register_forward_hook(self._end_forward)
        for index, parameter in enumerate(replica.parameters):
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(index))
        replica.optimizer.register_step_post_hook(self._end_step)

    def leave_out(self, duration_s: float) -> None:
        """Count so long as no part of a step."""
        self._left_out_s += duration_s

    def report(self, address: str) -> StepReport:
        """Raises UsageError if the script trained too little."""
        if len(self._steps_s) < MIN_STEPS:
            raise UsageError(
                f"the script took {len(self._steps_s)} training step(s), and probing needs at least {MIN_STEPS}; "
                "have it train longer, and through paceline's worker.prepare"
            )
        first = min(_NUM_WARMUP, len(self._steps_s) - MIN_STEPS + 1)
        # Medians: a step that something else held up says nothing of how it is divided.
        parts_s = [statistics.median(part) for part in zip(*self._parts_s[first:], strict=True)]
        whole_s = sum(parts_s)
        return StepReport(
            address,
            tuple(self._steps_s[first:]),
            statistics.median(self._shares[first:]),
            tuple(part_s / whole_s for part_s in parts_s) if whole_s else (),
        )

    def _awake_s(self) -> float:
        return self._now_s() - self._left_out_s

    def _end_forward(self, model: nn.Module, inputs: Sequence[Any], output: object) -> None:
        if torch.is_grad_enabled():
            self._num_passes += 1
            self._backward_began_s = self._awake_s()
            self._ready_s.clear()

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(_: Tensor) -> None:
            now_s = self._awake_s()
            self._backward_s += now_s - max(self._ready_s.values(), default=self._backward_began_s)
            self._ready_s[index] = now_s

        return on_gradient

    def _end_step(self, *_: object) -> None:
        now_s, real_s = self._awake_s(), self._now_s()
        if self._began_s is None:
            self._began_s = real_s
        elif self._num_passes:
            step_s = now_s - self._step_began_s
            self._steps_s.append(step_s / self._num_passes)
            self._shares.append(min(self._backward_s / step_s, 1.0) if step_s else 0.0)
            self._parts_s.append(self._parts())
        self._step_began_s, self._num_passes, self._backward_s = now_s, 0, 0.0
        num_done = len(self._steps_s)
        is_late = real_s - self._began_s >= self._max_s and num_done >= MIN_STEPS
        if num_done >= self._num_steps or is_late:
            raise _Enough("the steps have been measured")

    def _parts(self) -> list[float]:
        """Seconds that each parameter's gradient took in the last backward pass."""
        parts_s = [0.0] * self._num_parameters
        before_s = self._backward_began_s
        for index, ready_s in sorted(self._ready_s.items(), key=lambda item: item[1]):
            parts_s[index] = ready_s - before_s
            before_s = ready_s
        return parts_s


@dataclass(frozen=True)
class MeasuredScript:
    """A program that runs a script for some steps and tells a `StepReport`."""

    script: Script
    num_steps: int
    max_s: float

    def __call__(self) -> None:
        world = current()
        assert world is not None
        watch = StepWatch(num_steps=self.num_steps, max_s=self.max_s)
        world.context = replace(world.context, pacing=watch)
        with sleeps_told(watch.leave_out), rows_told(watch.leave_out):
            run_program(self.script)
        world.at_end.clear()  # the model is nobody's: it is neither evaluated nor saved
        tell(world, asdict(watch.report(own_address())))


def tell(world: World, report: dict[str, Any]) -> None:
    world.reporter.emit(EventRecord(EVENT, f"worker-{world.context.rank}", 0, 0.0, report))


def read(report: Mapping[str, Any]) -> StepReport:
    """A report as it comes from the records, in which tuples are lists."""
    return StepReport(
        report["address"], tuple(report["steps_s"]), report["backward_share"], tuple(report["gradient_shares"])
    )


@contextmanager
def sleeps_told(tell: Callable[[float], None]) -> Iterator[None]:
    """`tell` hears how long each `time.sleep` of this thread was to take; what it took beyond that is the machine's."""
    real, owner = time.sleep, threading.get_ident()

    def sleep(duration_s: float, /) -> None:
        real(duration_s)
        if threading.get_ident() == owner:
            tell(duration_s)

    time.sleep = sleep  # type: ignore[assignment]
    try:
        yield
    finally:
        time.sleep = real


@contextmanager
def rows_told(tell: Callable[[float], None]) -> Iterator[None]:
    """`tell` hears how long tables in this process are at what servers do with their rows."""
    real = {name: getattr(Table, name) for name in ("read", "require", "update")}
    under_way: list[str] = []  # they call one another

    def timed(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            under_way.append(name)
            try:
                return real[name](*arguments)
            finally:
                under_way.pop()
                if not under_way:
                    tell(time.perf_counter() - began_s)

        return call

    for name in real:
        setattr(Table, name, timed(name))
    try:
        yield
    finally:
        for name, action in real.items():
            setattr(Table, name, action)
