"""The contract: a `Strategy` says what is exchanged, with whom and when; a `Synchronizer` does it for one worker."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, final, get_args

from torch import Tensor, nn

from paceline.aggregate import MEAN, Aggregator
from paceline.codec import TensorCodec
from paceline.comm.base import Timing
from paceline.errors import NonFiniteGradient, UsageError
from paceline.layout import Layout
from paceline.membership import Membership
from paceline.roster import Participation
from paceline.server.admission import AdmissionRule
from paceline.server.ranges import KeyRange
from paceline.server.spec import OptimizerSpec, ServerSpec
from paceline.server.state import export_state, import_state
from paceline.server.tables.storage import TableFiles
from paceline.strategies.context import Context, Recovery
from paceline.strategies.global_model import averaged
from paceline.strategies.meeting import gathered
from paceline.strategies.own_state import OwnState
from paceline.strategies.pass_ends import Passes
from paceline.strategies.progress import Progress
from paceline.strategies.replica import Replica
from paceline.strategies.traits import Traits

__all__ = [
    "Context",
    "NonFinitePolicy",
    "Recovery",
    "StepOutcome",
    "Strategy",
    "Synchronizer",
    "non_finite",
    "option",
    "option_docs",
    "require_choice",
]

NonFinitePolicy = Literal["raise", "skip", "allow"]


def option(default: Any, doc: str) -> Any:
    """A strategy's option: a dataclass field that carries its own line of documentation."""
    return field(default=default, metadata={"doc": doc})


class StepOutcome(NamedTuple):
    """Where the run is after one worker's step."""

    iteration: int
    stop: bool = False
    """Every worker ends after this step."""
    staleness: int = 0
    """How stale the gradient was; -1 where it was not applied."""
    admitted: bool = True
    """False: call `Synchronizer.wait_for_admission` before the next step."""
    meets: bool = False
    """The next step is to come after a pause, whatever the iteration is."""


class Synchronizer(ABC):
    """What happens between `backward()` and the next `forward()` on one worker.

    What most strategies do not need has a default here: the optimizer steps on this worker, all workers hold the same
    parameters, and nobody waits between steps.
    """

    stop_vote: Callable[[], bool] = staticmethod(lambda: False)
    """Asked once a step where the strategy's trait `tells_stop` holds: does this worker want all to stop?"""
    number: int = 0
    """Which of the run's optimizers it is for."""
    title: str = ""
    """That optimizer's name, if there are several."""
    progress: Callable[[], Progress] = Progress
    """How far the script is. Where workers are in lock step, it is the same on all of them at every exchange."""
    gradients_are_spent: bool = False
    """No gradient has come since the step before: the optimizer calls its closure for those that it steps with."""
    has_updated: bool = True
    """Whether the last step changed the model, or was the last of those that make up its update."""
    facts: Mapping[str, float | str] = {}
    """What was measured or chosen at the start, for the records."""
    takes_in: bool = True
    """Whether one who joins may take part in the next exchange, where workers come and go."""
    ended_by: str = ""
    """Why a `StepOutcome` says that every worker ends, where that is not because a script did."""

    def __init__(self, context: Context, replica: Replica) -> None:
        self.context, self.replica = context, replica
        self.iteration = 0
        """Global iterations so far, in the strategy's unit."""

    @abstractmethod
    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        """The optimizer's step. `update` is the script's own optimizer step, for strategies that update locally.

        Args:
            pause_at: do not wait for slower workers once the global iteration is this far.

        Raises:
            NonFiniteGradient: a gradient is not finite and the strategy's option says `raise`.
        """

    @final
    def require_joint_step(self) -> None:
        """What follows needs all workers to step the same of several optimizers. Collective call if there are several.
        Raises UsageError, on all, where they do not."""
        if self.title:
            gathered(self.context.collective, f"a step of {self.title!r}")

    def start(self) -> None:
        """Every worker's script is about to ask for its first batch. Collective call."""

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure for an optimizer that calls it within its step. By default the script's own, for strategies
        that exchange nothing before a step is over. Where gradients are exchanged, the loss is to be the same on every
        worker as well, so that all take the same decisions from it.

        Raises:
            UsageError: this worker's optimizer takes no steps.
        """
        return closure

    @property
    def owes(self) -> bool:
        """Whether something of this worker is yet to be sent, which its next step or exchange does when it has been
        asked to leave (`Regrouping.is_asked_to_leave`)."""
        return False

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The running totals that this worker's steps are accounted from."""
        return (self.context.collective.timing,)

    @property
    def sender(self) -> int:
        """Whose steps these are, as aggregators and attacks count senders: this worker's, or the client's it plays."""
        return self.context.rank

    @property
    def passes(self) -> Passes | None:
        """The backward passes whose gradients it takes up as they end; none: it looks at gradients in steps alone."""
        return None

    def set_weight(self, weight: float) -> None:
        """The next backward passes are of a batch with this share of its global batch, times the number of workers."""

    def set_synchronizing(self, on: bool) -> bool:
        """Whether backward passes from here on exchange gradients; returns what was set before."""
        return True

    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        """Block until this worker may compute its next gradient."""
        return StepOutcome(self.iteration)

    def meet(self, iteration: int, *, active: Sequence[int]) -> int:
        """All workers are in a pause: what is under way between them ends. Collective call.

        Args:
            iteration: the furthest that a worker knows of.
            active: the ranks that take further steps.

        Returns:
            The iteration that the run is at.
        """
        return iteration

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """The model that is evaluated and saved. Collective call, while all workers pause.

        By default this worker's, with the mean over workers of what no optimizer trains: buffers of real numbers, and
        parameters. What was changed for it is as before at the end. Strategies whose workers differ give
        `averaged_model`.
        """
        with averaged(self.replica.untrained, self.context.collective):
            yield self.replica.model

    @contextmanager
    @final
    def averaged_model(self) -> Iterator[nn.Module]:
        """The mean of all workers' parameters and buffers, as a `global_model` of workers that differ."""
        replica = self.replica
        with averaged([*replica.all_parameters, *replica.buffers], self.context.collective):
            yield replica.model

    @property
    def measures(self) -> Mapping[str, float]:
        """What is known of the global model at this iteration besides what the script's evaluation finds, such as what
        it has cost; recorded with every evaluation."""
        return {}

    def end_turn(self) -> StepOutcome:
        """The script asks for another pass over its data, and is done with the one before, if there was one. Called
        under strategies that have clients."""
        return StepOutcome(self.iteration)

    def begin_turn(self) -> None:
        """The next batch is of the next client. Called under strategies that have clients."""

    def require_between_rounds(self, place: str) -> None:
        """Raises UsageError where this worker has turns left in the round, which all others wait for. Called under
        strategies that have clients."""

    def end_round(self) -> None:
        """End the round of local steps that is under way, if there is one, before its time. Collective call."""

    def enter(self) -> None:
        """This worker has joined others: take part in what they exchange of a round, to which it adds nothing, where
        strategies have rounds. Collective call."""

    def leave(self) -> None:
        """This worker takes no further step; nobody is to wait for it."""

    def step_aside(self) -> None:
        """This worker waits for all others at a place of their scripts, and steps when it has come back. Called under
        strategies whose servers take first comers, which are not to wait for it."""

    def come_back(self) -> None:
        """All are at that place. Called on every worker before one of them steps."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """State as full tensors keyed `<parameter index>.<state name>`, wherever it is held. Rank 0's is saved."""
        return export_state(self.replica.optimizer, self.replica.parameters)

    def own_state(self) -> dict[str, OwnState]:
        """What a checkpoint has to hold of this worker besides: what differs from worker to worker."""
        return {}

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        """Continue from a checkpoint: this worker's model holds the global parameters.

        Args:
            state: of the optimizer, the same for all workers.
            own: what `own_state` gave, or what became of it with another number of workers or another strategy.
        """
        import_state(self.replica.optimizer, self.replica.parameters, state)
        self.iteration = iteration

    def rejoin(self, context: Context, *, facts: Mapping[str, float | str] | None = None) -> None:
        """Go on among those who are there now, under strategies whose trait `survives` holds. Collective call.

        `facts`: the others', where this worker joins them.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Undo every hook on the model."""


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """A frozen, picklable description; its fields are the options of the command line."""

    nonfinite: NonFinitePolicy = option("raise", "what to do with a NaN or infinite gradient: raise, skip or allow")

    def __post_init__(self) -> None:
        require_choice("nonfinite", self.nonfinite, get_args(NonFinitePolicy))
        self.validate()

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What holds for every run under this strategy."""

    @abstractmethod
    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        """This worker's live half. Collective call. Raises UsageError if the strategy cannot honour something the
        optimizer or the model asks for."""

    def validate(self) -> None:
        """Raise UsageError for a value that is out of range or has no effect."""

    def check(self, *, num_workers: int) -> None:
        """Raise UsageError where the strategy cannot run with so many workers."""

    def participation(self) -> Participation | None:
        """The clients, each with data of its own, whose turns the passes of a script over its data are. None: a pass is
        over this worker's part of all data."""
        return None

    def check_elsewhere(self) -> None:
        """Raises UsageError where these clients cannot be processes of somebody's, elsewhere."""

    def admission_rule(self, members: Membership) -> AdmissionRule | None:
        """A fresh rule for one server; none where there are no servers."""
        return None

    def admission_rule_beside(self, members: Membership) -> AdmissionRule:
        """A fresh rule for the servers' half of an optimizer that is not the run's first.

        A worker may be in a pause, which the first optimizer's iterations bring about, when another one steps: nobody
        may wait here for a worker that has gone so far in its script. Raises UsageError where there is no such rule.
        """
        raise UsageError(f"{type(self).__name__} has no rule for a second optimizer on the servers; prepare one")

    def aggregator(self) -> Aggregator:
        """How servers join the contributions to one update."""
        return MEAN

    def codec_of_pushes(self) -> TensorCodec | None:
        """What servers decode that workers on other hosts push; none: gradients come as they are."""
        return None

    def table_files(self) -> TableFiles | None:
        """Where servers have the rows of tables; none: in their memory."""
        return None

    @final
    def server_spec(
        self,
        layout: Layout,
        pieces: KeyRange,
        optimizer: OptimizerSpec,
        *,
        members: Membership,
        max_updates: int | None,
        number: int,
    ) -> ServerSpec:
        """What one server holds for the run's optimizer of this number. The first one's updates of the model count, and
        end the run.
        Raises UsageError as `admission_rule_beside`."""
        rule = self.admission_rule_beside(members) if number else self.admission_rule(members)
        assert rule is not None
        limit = None if number or self.traits.serves_rows_alone else max_updates
        codec = self.codec_of_pushes()
        files = self.table_files()
        return ServerSpec(layout, pieces, optimizer, rule, limit, self.aggregator(), codec, number, files)


def require_choice(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} must be one of {', '.join(map(str, known))}, not {value!r}")


def non_finite(*, rank: int, step: int, parameter: str | None) -> NonFiniteGradient:
    """The error for a gradient that is not finite, on this rank or (without a name) on another."""
    where = f"of parameter {parameter!r} on rank {rank}" if parameter else f"on another rank than {rank}"
    return NonFiniteGradient(
        f"step {step}: the gradient {where} is not finite; nothing of it was applied "
        "(lower the learning rate or clip; --option nonfinite=skip leaves such steps out)"
    )


def option_docs(strategy: type[Strategy]) -> dict[str, tuple[Any, str]]:
    """Each option's default and its line of documentation."""
    return {f.name: (f.default, f.metadata["doc"]) for f in fields(strategy) if "doc" in f.metadata}
