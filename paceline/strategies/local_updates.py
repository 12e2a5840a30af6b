"""Local updates: every worker trains alone, and now and then what all have changed is joined."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final, get_args

import torch
from torch import Tensor, nn

from paceline.aggregate import MEAN, Aggregator
from paceline.codec import Auto, Codec
from paceline.comm.base import Timing
from paceline.errors import NonFiniteGradient, PeerLost, UsageError
from paceline.outer import Average, Outer
from paceline.schedule import Rounds
from paceline.strategies.base import (
    Context,
    Recovery,
    StepOutcome,
    Strategy,
    Synchronizer,
    non_finite,
    option,
    require_choice,
)
from paceline.strategies.choosing import Choosing, LinkSpeed
from paceline.strategies.codec_choice import CodecChoice
from paceline.strategies.coding import (
    CODEC_DOC,
    SCOPE_DOC,
    Coding,
    Scope,
    of_changes,
    require_of_changes,
)
from paceline.strategies.finite import checked, step_alone
from paceline.strategies.joined_states import JoinedStates
from paceline.strategies.joint import AGGREGATE_DOC, require_joint
from paceline.strategies.outer_model import OuterModel
from paceline.strategies.overlap import Overlap
from paceline.strategies.own_state import OwnState, load_replica, of_replica
from paceline.strategies.regrouping import ResultHandedOn
from paceline.strategies.replica import Replica, require_same_parameters
from paceline.strategies.round_weights import RoundWeights
from paceline.strategies.traits import AllReduced, Traits

_WEIGHTS = "weights"


@final
@dataclass(frozen=True, kw_only=True)
class LocalUpdates(Strategy):
    """Rounds of local steps with the script's own optimizer; then an outer optimizer steps with the mean change.

    With `outer=average` local SGD (Stich, ICLR 2019, algorithm 1), which is post-local SGD with `post_local_from` (Lin
    et al., ICLR 2020); with `momentum` SlowMo (Wang et al., ICLR 2020, algorithm 1); with `nesterov` DiLoCo (Douillard
    et al., 2023, algorithm 1), and with `fragments` or `delay`, too, Streaming DiLoCo (Douillard et al., 2025).

    The inner optimizer's state stays with its worker, unless its moments have periods of their own (DES-LOC: Iacob et
    al., 2025). Changes count by the samples that they were made from.

    >>> LocalUpdates(every=20).traits.unit
    'round'
    """

    every: int = option(50, "local steps of a round")
    outer: Outer = option(
        Average(), "what steps with the workers' mean change: average, momentum, nesterov, adam or torch"
    )
    post_local_from: int = option(0, "the first so many rounds have one step each")
    warmup: int = option(0, "so many rounds, after these, grow evenly from one step to `every`")
    fragments: int = option(1, "parts of the model, which are exchanged one after the other in a round")
    delay: int = option(0, "local steps that a worker takes while a fragment is under way")
    alpha: float = option(0.0, "how much a worker keeps of its own parameters when it takes a fragment; 0: nothing")
    momentum_every: int = option(
        0, "rounds from one averaging of the script's optimizers' first moments to the next; 0: each keeps its own"
    )
    variance_every: int = option(0, "rounds from one averaging of their second moments to the next; 0: never")
    codec: Codec | None = option(None, CODEC_DOC.replace("gradients travel", "the workers' changes travel"))
    codec_scope: Scope = option("links", SCOPE_DOC)
    aggregate: Aggregator = option(MEAN, AGGREGATE_DOC.replace("gradients", "the workers' changes"))

    def validate(self) -> None:
        try:
            _ = self.schedule
        except ValueError as error:
            raise UsageError(str(error).replace("single", "post_local_from")) from None
        self.outer.require_possible()
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"alpha must be 0 to 1, not {self.alpha}")
        if self.alpha == 1 and self.outer == Average():
            raise UsageError("alpha=1 with outer=average has no effect on any worker: each goes on alone")
        for name in ("post_local_from", "warmup"):
            if self.every == 1 and getattr(self, name):
                raise UsageError(f"{name} has no effect with every=1, where all rounds have one step")

        for name in ("momentum_every", "variance_every"):
            if (period := getattr(self, name)) < 0:
                raise UsageError(f"{name} must be at least 0, not {period}")
            if period and not self.aggregate.streams:
                raise UsageError(f"{name} takes means, against which aggregate={self.aggregate} guards; use {name}=0")
        require_choice("codec_scope", self.codec_scope, get_args(Scope))
        require_of_changes(self.codec, self.codec_scope, delay=self.delay)
        if self.codec is not None and not self.aggregate.streams:
            raise UsageError(f"aggregate={self.aggregate} looks at each worker's whole change; leave out codec")
        if self.fragments > 1 and not self.aggregate.is_coordinate_wise:
            raise UsageError(
                f"aggregate={self.aggregate} compares whole changes; use fragments=1, not {self.fragments}"
            )

    def check(self, *, num_workers: int) -> None:
        require_joint(self.aggregate, num_workers)

    @property
    def schedule(self) -> Rounds:
        return Rounds(
            every=self.every,
            fragments=self.fragments,
            delay=self.delay,
            single=self.post_local_from,
            warmup=self.warmup,
        )

    @property
    def traits(self) -> Traits:
        moved = AllReduced(
            every=self.every,
            fragments=self.fragments,
            delay=self.delay,
            codec=of_changes(self.codec),
            codec_scope=self.codec_scope,
            num_besides=sum(1 / period for period in (self.momentum_every, self.variance_every) if period),
        )
        repeats = not self.aggregate.remembers
        return Traits(lock_step=False, unit="round", repeats_steps=repeats, passes_attacks=True, traffic=(moved,))

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return _LocalSynchronizer(self, context, replica)


@final
class _LocalSynchronizer(Synchronizer):
    def __init__(self, strategy: LocalUpdates, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._strategy, self._schedule = strategy, strategy.schedule
        self._choice = CodecChoice(of_changes(strategy.codec), strategy.codec_scope, self._watch)
        coding = self._choice.begin(context)
        self.facts = self._choice.told(self.facts)
        self._outer = OuterModel(
            context,
            replica,
            num_fragments=strategy.fragments,
            outer=strategy.outer,
            aggregator=strategy.aggregate,
            coding=coding,
        )
        self._states = JoinedStates(
            context.collective,
            replica,
            momentum_every=strategy.momentum_every,
            variance_every=strategy.variance_every,
        )
        self._overlap = Overlap(context.collective.timing, now_s=context.pacing.now_s)
        self._left_out: set[int] = set()  # fragments under way that are not finite here
        self._is_apart = False  # somebody is gone or comes, and those who are there have not met yet
        self._is_new = False  # it enters the exchange that is under way, with a copy of another one's states
        self._last_result: list[memoryview] = []
        if context.recovery is not None:
            context.recovery.last_result = lambda: self._last_result
        self._begins_alike = strategy.fragments == 1 and strategy.alpha == 0
        self._steps = 0
        self._weight = 1.0
        self._weights = RoundWeights(strategy.fragments, context.recovery)

    def start(self) -> None:
        if not self._steps:
            self._outer.begin()

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (self.context.collective.timing, self._overlap.timing, self._outer.timing)

    @property
    def owes(self) -> bool:
        return self._outer.owes

    def set_weight(self, weight: float) -> None:
        self._weight = weight

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        nonfinite = self._strategy.nonfinite
        return checked(closure, self.replica, nonfinite, rank=self.context.rank, step=self._steps + 1)

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        self._overlap.end()
        require_same_parameters(self.replica)
        # A batch that a worker is given for want of one of its own is another's, and is not to count.
        counts = self._weight > 0
        applies = step_alone(self, update, self._strategy.nonfinite, step=self._steps + 1, counts=counts)
        if applies:
            self._states.require_there()
        self._weights.step(self._weight)
        self._pass_step()
        self._move_on()
        return StepOutcome(self.iteration, staleness=0 if applies else -1)

    def leave(self) -> None:
        """If the data ended in a round, end it: on every worker, as all have as many batches."""
        self.end_round()

    def end_round(self) -> None:
        while self._schedule.num_steps(self.iteration) < self._steps:
            self._pass_step()

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """The parameters that all workers share, and the mean of their buffers.

        Where all workers begin a round with these, what one has besides its script has done since: that counts too.
        """
        if self._begins_alike:
            with self.averaged_model() as model:
                yield model
            return
        with self._outer.in_place(), super().global_model() as model:
            yield model

    def own_state(self) -> dict[str, OwnState]:
        own = of_replica(self.replica)
        for index in range(len(self.replica.parameters)):
            if not self._outer.is_local(index):
                del own[f"parameters.{index}"]
        return {
            **own,
            **self._outer.own_state(with_shared=self._begins_alike or self.context.recovery is not None),
            _WEIGHTS: OwnState(self._weights.state()),
        }

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        super().restore(state, own, iteration=iteration)
        self._outer.restore(own)
        load_replica(self.replica, self._outer.without_others(own) if self._begins_alike else own)
        self._steps = self._schedule.num_steps(iteration)
        self._weights.load(own.get(_WEIGHTS, torch.zeros(0)))

    @property
    def takes_in(self) -> bool:  # type: ignore[override]
        """One who joins enters at the end of a round."""
        end = self._schedule.num_steps(self.iteration + 1)
        return not any(self._schedule.due(step) for step in range(self._steps + 1, end))

    def _pass_step(self) -> None:
        """A step is over: exchange what is due."""
        self._steps += 1
        leaving, due = self._schedule.leaving(self._steps), self._schedule.due(self._steps)
        if leaving or due:
            self.require_joint_step()
        for fragment in leaving:
            self._leave(fragment)
        self._start_early(leaving)
        self._end_step(due)

    def _end_step(self, due: Sequence[int]) -> None:
        """What is due becomes everybody's, and a round may be over with it."""
        iteration = self._schedule.num_rounds(self._steps)
        ended = iteration if iteration > self.iteration else None
        recovery = self.context.recovery
        if recovery is None:
            self._join(due, self._wait(due, ended=ended))
        elif due:
            self._repeat(recovery, due, ended=ended)
        self._take_up_codec()
        self.iteration = iteration

    def _leave(self, fragment: int) -> None:
        """What this worker has changed in it up to now is to be exchanged."""
        self._weights.leave(fragment)
        if self.context.recovery is not None and self._strategy.delay:
            self._outer.keep(fragment)

    def _start_early(self, fragments: Sequence[int]) -> None:
        """What leaves is on its way from here on, unless somebody is gone or comes: then that begins when it is due."""
        recovery = self.context.recovery
        if recovery is None:
            self._start(fragments)
        elif not (self._is_apart or recovery.has_given):
            with self._noting_loss():
                self._start(fragments)

    def _start(self, fragments: Sequence[int]) -> None:
        for fragment in fragments:
            if not self._outer.has_started(fragment):
                weights = self._weights.of_all(fragment)
                self._take(fragment, weights)
                self._outer.start(fragment, step=self._steps, weights=weights)

    def _move_on(self) -> None:
        """What is under way."""
        with nullcontext() if self.context.recovery is None else self._noting_loss():
            if self._outer.is_under_way():
                self._overlap.begin()

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Note that somebody is gone; that is dealt with when an exchange is due."""
        try:
            yield
        except PeerLost:
            self._is_apart = True

    def _wait(self, fragments: Sequence[int], *, ended: int | None) -> list[str | None]:
        """Wait for the means, which change nothing yet. Returns for each the name of a tensor that the codec did not
        hold, if there is one. `ended`: the round that is over with them."""
        culprits = [self._outer.wait(fragment) for fragment in fragments]
        if ended is not None:
            self._states.average(ended, counts=not self._is_new)
            if ended > self._strategy.post_local_from + self._strategy.warmup:  # rounds of full length show the most
                self._choice.look()
        return culprits

    def _join(self, fragments: Sequence[int], culprits: Sequence[str | None]) -> None:
        for fragment, culprit in zip(fragments, culprits, strict=True):
            self._join_one(fragment, culprit)
            self._weights.join(fragment)
        self._states.take_up(takes=self._takes_state)

    def _repeat(self, recovery: Recovery, due: Sequence[int], *, ended: int | None) -> None:
        """Exchange what is due until nobody dies in it or joins, each time among those who are there. Local steps are
        as they were; what changes is how much they count.

        With a delay a worker may have given its part, and die before it comes here. So all say that they have come:
        otherwise what it had of the data would count, though it has not trained on all of that. So do they where
        changes go by messages, of which one worker may have all and another lack a dead one's.
        """
        self._is_apart = self._is_apart or recovery.has_given
        while True:
            try:
                if self._is_apart:
                    self.rejoin(recovery.regroup())
                self._start(due)
                culprits = self._wait(due, ended=ended)
                if self._strategy.delay or not self._outer.completes_alike:
                    self.context.collective.all_reduce(torch.zeros(1), op="max").wait()
                break
            except PeerLost:
                self._is_apart = True
            except ResultHandedOn as handed:  # the others are an exchange further, and wait for this worker
                self._states.take_means(self._outer.take_means(due, handed.frames))
                culprits = [self._outer.wait(fragment) for fragment in due]
                break
        if not self.context.collective.completes_alike:  # another worker may have missed it
            self._last_result = [*self._outer.means(due), *self._states.means()]
        self._join(due, culprits)
        recovery.commit(asks_from=self._weights.asks_from)

    def rejoin(self, context: Context, *, facts: Mapping[str, float | str] | None = None) -> None:
        self.context = context
        if facts is not None:
            self.facts = facts
        self._outer.exchange_among(context, coding=self._choice.rejoin(context))
        self.facts = self._choice.told(self.facts)
        self._states.exchange_among(context.collective)
        self._weights.regroup()
        said = context.collective.broadcast_object(self._weights.said())
        if facts is not None:
            self._weights.take_up(said)
        self._is_apart = False

    def enter(self) -> None:
        """Take part in the end of a round, with nothing of this worker's own."""
        self._outer.begin_alike()
        self._is_new = True
        self._steps = self._schedule.num_steps(self.iteration + 1)
        due = self._schedule.due(self._steps)
        for fragment in due:
            if not self._weights.has_left(fragment):  # nobody is there who has trained on it
                self._weights.leave(fragment)
        self._end_step(due)
        self._is_new = False

    def _take_up_codec(self) -> None:
        """Encode with the codec that `auto` has chosen, if it has just chosen one."""
        if not self._choice.has_found:
            return
        if (coding := self._choice.take_up()) is not None:
            self._outer.use(coding)
        self.facts = self._choice.told(self.facts)

    def _watch(self, auto: Auto, context: Context, coding: Coding) -> Choosing:
        specs = self.replica.specs
        num_bytes = sum(spec.num_bytes for spec in specs)
        speed = LinkSpeed(context, among_hosts=coding.among_hosts, num_bytes=num_bytes)
        shapes = [spec.shape for spec in specs]
        taken_s = partial(speed.average_s, shapes=shapes, num_exchanges=self._strategy.fragments)
        return Choosing(auto, context, taken_s, what="round")

    def _takes_state(self, name: str) -> bool:
        if self._strategy.nonfinite == "raise":
            raise NonFiniteGradient(
                f"step {self._steps}: the mean of the optimizers' states {name!r} is not finite; lower the learning "
                "rate or clip, or leave each worker its own states"
            )
        return self._strategy.nonfinite == "allow"

    def _join_one(self, fragment: int, culprit: str | None) -> None:
        is_applied = culprit is None or self._strategy.nonfinite == "allow"
        if not is_applied and self._strategy.nonfinite == "raise":
            raise self._beyond_codec(f"the mean change of parameter {culprit!r}")
        # What was left out is not to stay: it would be left out for ever.
        is_kept = is_applied and fragment not in self._left_out
        self._left_out.discard(fragment)
        self._outer.join(fragment, alpha=self._strategy.alpha if is_kept else 0.0, is_applied=is_applied)

    def _beyond_codec(self, what: str) -> NonFiniteGradient:
        return NonFiniteGradient(
            f"step {self._steps}: codec={self._choice.codec} does not hold {what}; use bf16, whose range is that of "
            "float32, or leave the codec out"
        )

    def _weight_of(self, fragment: int) -> float:
        return self._weights.of(fragment) if self._strategy.aggregate.streams else 1.0

    def _take(self, fragment: int, weights: Sequence[float]) -> None:
        culprit = self._outer.take(fragment, weight=self._weight_of(fragment))
        self.context.corrupt(self._outer.taken(fragment), self._steps, weights=weights)
        unheld = self._outer.unheld(fragment) if culprit is None else None
        if culprit is unheld is None or self._strategy.nonfinite == "allow":
            return
        if self._strategy.nonfinite == "raise" and unheld is not None:
            raise self._beyond_codec(f"the change of parameter {unheld!r} on rank {self.context.rank}")
        if self._strategy.nonfinite == "raise":
            raise non_finite(rank=self.context.rank, step=self._steps, parameter=culprit)
        self._outer.leave_out(fragment)
        self._left_out.add(fragment)
