"""The contract: a `Strategy` says what is exchanged, with whom and when; a `Synchronizer` does it for one worker."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from paceline.aggregate import MEAN, Aggregator
from paceline.comm.base import Collective, OptimizerSpec, Store, Timing
from paceline.errors import NonFiniteGradient, UsageError
from paceline.layout import TensorSpec
from paceline.server.admission import AdmissionRule

NonFinitePolicy = Literal["raise", "skip", "allow"]


def option(default: Any, doc: str) -> Any:
    """A strategy's option: a dataclass field that carries its own line of documentation."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Context:
    """What an engine gives one worker."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    collective: Collective
    store: Store | None = None
    """Only for strategies that have servers."""
    now_s: Callable[[], float] = time.perf_counter
    """The clock that this worker's run is timed with, real or virtual."""
    watch: Callable[[Replica], None] = staticmethod(lambda replica: None)
    """Told of the model that the script prepares, before the strategy is; for engines that simulate computing."""
    before_batch: Callable[[int, int | None], None] = staticmethod(lambda num_samples, next_samples: None)
    """Told that the script asks for its next batch, of so many samples, to train on, and how many the one has that will
    be asked for right after its step; none: an epoch ends with it, or there may be a pause."""
    after_step: Callable[[], None] = staticmethod(lambda: None)
    """Told that the optimizer has stepped."""
    between_steps: Callable[[], None] = staticmethod(lambda: None)
    """Told that what is exchanged until the next batch belongs to no step: workers meet, or wait to be admitted."""
    takes_batches_ahead: bool = False
    """A core is free for taking the next batch while the present one is trained on."""


@dataclass(frozen=True)
class Replica:
    """A worker's model and optimizer, and how their parameters are called."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: tuple[nn.Parameter, ...]
    """Those that the optimizer updates and that require gradients, in the order of its groups."""
    specs: tuple[TensorSpec, ...]
    optimizer_spec: OptimizerSpec


class StepOutcome(NamedTuple):
    """Where the run is after one worker's step."""

    iteration: int
    stop: bool = False
    """Every worker ends after this step."""
    staleness: int = 0
    """Of the gradient; -1 where it was not applied."""
    admitted: bool = True
    """False: call `Synchronizer.wait_for_admission` before the next step."""


class Synchronizer(ABC):
    """What happens between `backward()` and the next `forward()` on one worker."""

    stop_vote: Callable[[], bool] = staticmethod(lambda: False)
    """Asked once a step: does this worker want all to stop?"""
    facts: Mapping[str, float] = {}
    """What was measured or chosen at the start, for the records."""

    @property
    @abstractmethod
    def timings(self) -> tuple[Timing, ...]:
        """The running totals that this worker's steps are accounted from."""

    @abstractmethod
    def set_weight(self, weight: float) -> None:
        """The next backward passes are of a batch with this share of its global batch, times the number of workers."""

    @abstractmethod
    def set_synchronizing(self, on: bool) -> bool:
        """Whether backward passes from here on exchange gradients; returns what was set before."""

    @abstractmethod
    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        """The optimizer's step. `update` is the script's own optimizer step, for strategies that update locally.

        Args:
            pause_at: do not wait for slower workers once the global iteration is this far.

        Raises:
            NonFiniteGradient: a gradient is not finite and the strategy's option says `raise`.
        """

    @abstractmethod
    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        """Block until this worker may compute its next gradient."""

    @abstractmethod
    def refresh(self) -> None:
        """Make this worker's model the global one. Called while all workers pause."""

    @abstractmethod
    def leave(self) -> None:
        """This worker takes no further step; nobody is to wait for it."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Tensor]:
        """State as full tensors keyed `<parameter index>.<state name>`, wherever it is held."""

    @abstractmethod
    def restore(self, state: dict[str, Tensor], *, iteration: int) -> None:
        """Continue from a checkpoint: this worker's model holds the parameters, `state` the optimizer's state.

        Called by every worker, with the same values.
        """

    @abstractmethod
    def close(self) -> None:
        """Undo every hook on the model."""


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """A frozen, picklable description; its fields are the options of the command line."""

    summary: ClassVar[str]

    nonfinite: NonFinitePolicy = option("raise", "what to do with a NaN or infinite gradient: raise, skip or allow")

    def __post_init__(self) -> None:
        require_choice("nonfinite", self.nonfinite, get_args(NonFinitePolicy))
        self.validate()

    @abstractmethod
    def validate(self) -> None:
        """Raise UsageError for a value that is out of range or has no effect."""

    @abstractmethod
    def check(self, *, num_workers: int) -> None:
        """Raise UsageError where the strategy cannot run with so many workers."""

    @abstractmethod
    def is_lock_step(self) -> bool:
        """Whether no worker ends a step without every other, so that all are always at the same step."""

    @abstractmethod
    def is_synchronous(self) -> bool:
        """Whether an iteration is one update with the mean of many workers' gradients, rather than one gradient's."""

    @abstractmethod
    def num_servers(self) -> int:
        """Servers the engine has to place."""

    @abstractmethod
    def admission_rule(self, *, num_workers: int) -> AdmissionRule | None:
        """A fresh rule for one server; none where there are no servers."""

    def aggregator(self) -> Aggregator:
        """How servers join the contributions to one update."""
        return MEAN

    @abstractmethod
    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        """This worker's live half. Collective call.

        Raises:
            UsageError: the strategy cannot honour something the optimizer or the model asks for.
        """


def require_choice(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} must be one of {', '.join(map(str, known))}, not {value!r}")


def non_finite(*, rank: int, step: int, parameter: str | None) -> NonFiniteGradient:
    """The error for a gradient that is not finite, here or (without a name) on another rank."""
    where = f"of parameter {parameter!r} on rank {rank}" if parameter else f"on another rank than {rank}"
    return NonFiniteGradient(
        f"step {step}: the gradient {where} is not finite; nothing of it was applied "
        "(lower the learning rate or clip; --option nonfinite=skip leaves such steps out)"
    )


def option_docs(strategy: type[Strategy]) -> dict[str, tuple[Any, str]]:
    """Each option's default and its line of documentation."""
    return {f.name: (f.default, f.metadata["doc"]) for f in fields(strategy) if "doc" in f.metadata}
