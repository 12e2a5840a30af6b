"""What a script costs, found by running a few of its steps on the virtual engine, unchanged."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.config import RunConfig
from paceline.engines.scripting import Program
from paceline.engines.standing import Watcher
from paceline.engines.virtual.computing.flops import ForwardCount
from paceline.engines.virtual.engine import VirtualRun
from paceline.engines.virtual.job import VirtualJob
from paceline.engines.virtual.server import state_bytes
from paceline.errors import PacelineError, RunFailed, UsageError
from paceline.planner.demand import Demand, StepWork
from paceline.planner.noise import NoiseScale, NoiseSums
from paceline.planner.row_work import NUM_STEPS as NUM_ROW_STEPS
from paceline.planner.row_work import WatchedTables
from paceline.planner.weight_work import WatchedWeights
from paceline.records import EventRecord, Record, StepRecord
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer
from paceline.strategies.replica import Replica
from paceline.strategies.served_rows import ServedRows
from paceline.strategies.several import require_one_of_each
from paceline.strategies.single import Single
from paceline.strategies.traits import Traits

_ANYWHERE = Cluster(hosts=(Hosts(bandwidth_gbit_per_s=1.0),), compute=Compute(step_s=1.0))
_WARM_UP_STEPS = 10
"""With updates, before gradients are compared: the noise of a model that has learnt nothing yet is its least."""
NOISE_STEPS = 20
"""Gradients at the same parameters, for the noise scale."""


@dataclass(frozen=True)
class Observation:
    """What a script's first steps showed."""

    work: StepWork
    noise: NoiseScale | None


class _Enough(PacelineError):
    """The script has shown what a plan needs."""


def observe(program: Program, *, measures_noise: bool = False, seed: int = 0) -> Observation:
    """Run a step or two of a script or function as a single worker, or as many as its gradient noise scale takes.
    Raises UsageError, which says why, if it does not train for so long."""
    seen = _Seen()
    strategy = Observed(seen=seen, num_noise_steps=NOISE_STEPS if measures_noise else 0)
    failure: PacelineError | None = None
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as scratch:
        job = VirtualJob(program, strategy, 1, _ANYWHERE, RunConfig(seed=seed, device="cpu"))
        try:
            VirtualRun(job, Path(scratch), seen).run()
        except (RunFailed, UsageError) as error:
            failure = error
    if not seen.is_complete:
        num_needed = _WARM_UP_STEPS + NOISE_STEPS if measures_noise else 2
        reason = f": {failure}" if failure is not None else f" and ended after {len(seen.samples)} step(s)"
        raise UsageError(
            f"a plan needs a script that trains through worker.prepare, at least {num_needed} steps; this one was run "
            f"as a single worker on the virtual engine{reason}"
        )
    work = seen.work()
    return Observation(work, seen.noise_sums.scale(batch=work.samples) if measures_noise else None)


class _Seen(Watcher):
    """Collects it; watches the run, whose output is nobody's business here."""

    def __init__(self) -> None:
        self.is_complete = False
        self.noise_sums = NoiseSums()
        self.replica: Replica | None = None
        self.tables = WatchedTables()
        self.weights: WatchedWeights | None = None
        self.forward_flop, self.forward_calls = 0.0, 0
        self.shares: tuple[float, ...] = ()
        self.state_bytes = 0.0
        self.data_samples = 0
        self.demand: Demand | None = None
        self.samples: list[int] = []
        """How many samples each step took; records arrive some at a time."""

    def work(self) -> StepWork:
        assert self.replica is not None
        assert self.weights is not None
        return StepWork(
            tensor_bytes=tuple(max(1, spec.num_bytes) for spec in self.replica.specs),
            tensor_shapes=tuple(spec.shape for spec in self.replica.specs),
            samples=self.samples[0],
            data_samples=self.data_samples,
            forward_flop=self.forward_flop,
            forward_calls=self.forward_calls,
            backward_shares=self.shares,
            state_bytes=self.state_bytes,
            is_element_wise=self.replica.optimizer_spec.element_wise,
            rows=self.tables.work() if self.replica.tables else None,
            weights=self.weights.work(),
            demand=self.demand,
        )

    def on_records(self, records: Sequence[Record]) -> None:
        self.samples += [record.samples for record in records if isinstance(record, StepRecord)]
        for record in records:
            if isinstance(record, EventRecord) and record.name == "demands":
                self.demand = Demand(**record.details)


@final
@dataclass(frozen=True, kw_only=True)
class Observed(Strategy):
    """A single worker whose model, optimizer and gradients are looked at."""

    seen: _Seen
    num_noise_steps: int

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=True, tells_stop=True, holds_rows=True, traffic=())

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        require_one_of_each(replica, "a plan")
        return _ObservedSynchronizer(self, context, replica)


@final
class _ObservedSynchronizer(Synchronizer):
    """Trains as a single worker for some steps; then holds the parameters still and compares gradients."""

    def __init__(self, strategy: Observed, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._seen, self._rows = strategy.seen, ServedRows(context, strategy.seen.tables, replica.tables, keeping=None)
        self._weights = strategy.seen.weights = WatchedWeights(replica)
        self._num_row_steps = NUM_ROW_STEPS if replica.tables or self._weights.are_some else 0
        self._inner = Single(nonfinite="allow").bind(context, replace(replica, is_first=False))
        self._num_noise_steps = strategy.num_noise_steps
        self._steps = 0
        self._count: ForwardCount | None = None
        self._flop_of_pass, self._calls_of_pass = 0.0, 0
        self._num_passes = 0
        strategy.seen.replica, strategy.seen.data_samples = replica, context.data_samples
        # Inside what the engine counts: modes are left in the reverse order.
        self._hooks: list[Any] = [
            replica.model.register_forward_pre_hook(self._begin_forward),
            replica.model.register_forward_hook(self._end_forward, prepend=True),
        ]

    def step(self, update: Any, *, pause_at: int) -> StepOutcome:
        self._steps += 1
        if self._steps == 1:  # which may have accumulated gradients over several passes
            self._seen.forward_flop = self._flop_of_pass * self._num_passes
            self._seen.forward_calls = self._calls_of_pass * self._num_passes
        if self._steps == 2:
            self._seen.state_bytes = state_bytes(self.replica.optimizer, self.replica.parameters)
        is_trained = self._steps > (_WARM_UP_STEPS if self._num_noise_steps else 1)
        self._seen.tables.end_step()
        self._weights.end_step()
        self._rows.push(weight=1.0, is_void=is_trained, are_finite=False)
        if not is_trained:
            return self._inner.step(update, pause_at=pause_at)
        if self._num_noise_steps:
            gradients = [parameter.grad for parameter in self.replica.parameters]
            self._seen.noise_sums.add([each.to_dense() for each in gradients if each is not None])
        if self._seen.noise_sums.count >= self._num_noise_steps:
            self._seen.is_complete = True
        if self._seen.is_complete and self._steps >= self._num_row_steps:
            raise _Enough("the plan has seen enough of the script")
        return StepOutcome(self._steps, staleness=-1)

    def _begin_forward(self, model: torch.nn.Module, inputs: object) -> None:
        if not torch.is_grad_enabled() or self._steps:  # an evaluation, or no longer the first step
            return
        self._num_passes += 1
        if not self._seen.shares and self._count is None:
            self._count = ForwardCount(model, self.replica.parameters)

    def _end_forward(self, model: torch.nn.Module, inputs: object, output: object) -> None:
        if self._count is not None:
            self._count.end(output)
            self._flop_of_pass, self._calls_of_pass = self._count.flop, self._count.num_calls
            self._seen.shares = tuple(self._count.shares())
            self._count = None
