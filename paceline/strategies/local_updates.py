"""Local updates: every worker trains alone, and now and then what all have changed is joined."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final, get_args

import torch
from torch import Tensor, nn

from paceline.aggregate import MEAN, Aggregator
from paceline.codec import Auto, Codec
from paceline.comm.base import Timing
from paceline.errors import NonFiniteGradient, PeerLost, UsageError
from paceline.messages import to_frames
from paceline.outer import Average, Outer, require_in_range
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
from paceline.strategies.coding import (
    CODEC_DOC,
    NOTHING_CODED,
    SCOPE_DOC,
    Scope,
    can_be_repeated,
    coding_of,
    of_changes,
    require_of_changes,
)
from paceline.strategies.finite import checked, may_step
from paceline.strategies.joined_states import JoinedStates
from paceline.strategies.joint import AGGREGATE_DOC, require_joint
from paceline.strategies.outer_model import OuterModel
from paceline.strategies.overlap import Overlap
from paceline.strategies.own_state import OwnState, load_replica, of_replica
from paceline.strategies.regrouping import ResultHandedOn
from paceline.strategies.replica import Replica, is_skipped_by_scaler, require_same_parameters
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
        require_in_range(self.outer)
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
        alike = self.fragments == 1 and not self.alpha and not self.momentum_every and not self.variance_every
        repeats = alike and not self.delay and can_be_repeated(self.codec) and self.aggregate.streams
        return Traits(lock_step=False, unit="round", repeats_steps=repeats, passes_attacks=True, traffic=(moved,))

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return _LocalSynchronizer(self, context, replica)


@final
class _LocalSynchronizer(Synchronizer):
    def __init__(self, strategy: LocalUpdates, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._strategy, self._schedule = strategy, strategy.schedule
        codec = of_changes(strategy.codec)
        coding = coding_of(codec, strategy.codec_scope, context)
        self._choosing: Choosing | None = None
        self._codec = codec
        if coding is not None and isinstance(codec, Auto):
            shapes = [spec.shape for spec in replica.specs]
            taken_s = partial(
                LinkSpeed(context, among_hosts=coding.among_hosts).average_s,
                shapes=shapes,
                num_exchanges=strategy.fragments,
            )
            self._choosing = Choosing(codec, context, taken_s, what="round")
            self._coding, coding = coding, None
        elif strategy.codec is not None:
            self.facts = {"codec": NOTHING_CODED if coding is None else str(coding.codec)}
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
        self._last_mean: list[Tensor] = []
        if context.recovery is not None:
            context.recovery.last_result = lambda: to_frames(self._last_mean)
        self._begins_alike = strategy.fragments == 1 and strategy.alpha == 0
        self._steps = 0
        self._weight = 1.0
        self._weights = [(0.0, 0)] * strategy.fragments
        """The sum of the steps' weights since each fragment left, and how many steps these are."""

    def start(self) -> None:
        if not self._steps:
            self._outer.begin()

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (self.context.collective.timing, self._overlap.timing, self._outer.timing)

    def set_weight(self, weight: float) -> None:
        self._weight = weight

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        nonfinite = self._strategy.nonfinite
        return checked(closure, self.replica, nonfinite, rank=self.context.rank, step=self._steps + 1)

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        self._overlap.end()
        require_same_parameters(self.replica)
        applies = self.gradients_are_spent or may_step(
            self.replica, self._strategy.nonfinite, rank=self.context.rank, step=self._steps + 1
        )
        # What a worker trains on that is another's, when it has nothing of its own, is not to count.
        applies = applies and self._weight > 0
        if applies:
            update()
        applies = applies and not is_skipped_by_scaler(self.replica.optimizer)
        if applies:
            self._states.require_there()
        self._weights = [(total + self._weight, count + 1) for total, count in self._weights]
        self._pass_step()
        if self._outer.is_under_way():
            self._overlap.begin()
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
            **self._outer.own_state(with_shared=self._begins_alike),
            _WEIGHTS: OwnState(torch.tensor(self._weights, dtype=torch.float64)),
        }

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        super().restore(state, own, iteration=iteration)
        self._outer.restore(own)
        load_replica(self.replica, self._outer.without_others(own) if self._begins_alike else own)
        self._steps = self._schedule.num_steps(iteration)
        if len(weights := own.get(_WEIGHTS, torch.zeros(0))) == len(self._weights):
            self._weights = [(float(total), int(count)) for total, count in weights]

    def _pass_step(self) -> None:
        """A step is over: exchange what is due."""
        self._steps += 1
        leaving, due = self._schedule.leaving(self._steps), self._schedule.due(self._steps)
        if leaving or due:
            self.require_joint_step()
        if due and self.context.recovery is not None:
            self._repeat(self.context.recovery)
        else:
            self._exchange(leaving, due)
        if (iteration := self._schedule.num_rounds(self._steps)) > self.iteration:
            self._states.join(iteration, takes=self._takes_state)
            self._choose(iteration)
        self.iteration = iteration

    def _exchange(self, leaving: Sequence[int], due: Sequence[int]) -> None:
        for fragment in leaving:
            self._take(fragment)
            self._outer.start(fragment, step=self._steps)
        for fragment in due:
            self._join(fragment)

    def _repeat(self, recovery: Recovery) -> None:
        """Exchange what this worker has changed until nobody dies in it or joins, each time among those who are there.
        A round's local steps are as they were; what changes is how much they count."""
        self._is_apart = self._is_apart or recovery.has_given
        while True:
            try:
                if self._is_apart:
                    self.rejoin(recovery.regroup())
                    self._weights = [(recovery.weight, 1)]
                self._exchange((0,), (0,))
                break
            except PeerLost:
                self._is_apart = True
            except ResultHandedOn as handed:  # the others are a round further, and wait for this worker
                self._outer.take_mean(handed.frames)
                self._weights = [(0.0, 0)]
                self._join(0)
                break
        recovery.commit()

    def rejoin(self, context: Context, *, facts: Mapping[str, float | str] | None = None) -> None:
        self.context = context
        if facts is not None:
            self.facts = facts
        coding = coding_of(self._codec, self._strategy.codec_scope, context)
        self._outer.exchange_among(context, coding=coding)
        self._is_apart = False

    def enter(self) -> None:
        self._steps = self._schedule.num_steps(self.iteration + 1) - 1
        self._weights = [(0.0, 1)]
        self._pass_step()

    def _choose(self, iteration: int) -> None:
        """Go on with a codec, if rounds of full length have shown that one is worth it."""
        is_full = iteration > self._strategy.post_local_from + self._strategy.warmup
        outcome = self._choosing.step_ended() if self._choosing is not None and is_full else None
        if outcome is None:
            return
        self.facts, self._choosing = {"codec": outcome.why}, None
        if (codec := outcome.codec) is not None:
            self._codec = codec
            self._outer.use(replace(self._coding, codec=codec))

    def _takes_state(self, name: str) -> bool:
        if self._strategy.nonfinite == "raise":
            raise NonFiniteGradient(
                f"step {self._steps}: the mean of the optimizers' states {name!r} is not finite; lower the learning "
                "rate or clip, or leave each worker its own states"
            )
        return self._strategy.nonfinite == "allow"

    def _join(self, fragment: int) -> None:
        culprit = self._outer.wait(fragment)
        if self.context.recovery is not None and not self.context.collective.completes_alike:
            self._outer.copy_mean(self._last_mean)  # another worker may have missed it
        is_applied = culprit is None or self._strategy.nonfinite == "allow"
        if not is_applied and self._strategy.nonfinite == "raise":
            raise self._beyond_codec(f"the mean change of parameter {culprit!r}")
        # What was left out is not to stay: it would be left out for ever.
        is_kept = is_applied and fragment not in self._left_out
        self._left_out.discard(fragment)
        self._outer.join(fragment, alpha=self._strategy.alpha if is_kept else 0.0, is_applied=is_applied)

    def _beyond_codec(self, what: str) -> NonFiniteGradient:
        return NonFiniteGradient(
            f"step {self._steps}: codec={self._codec} does not hold {what}; use bf16, whose range is that of "
            "float32, or leave the codec out"
        )

    def _take(self, fragment: int) -> None:
        total, count = self._weights[fragment]
        self._weights[fragment] = (0.0, 0)
        weight = total / count if self._strategy.aggregate.streams else 1.0
        culprit = self._outer.take(fragment, weight=weight)
        if self.context.corrupt is not None:
            self.context.corrupt(self._outer.taken(fragment), self._steps)
        unheld = self._outer.unheld(fragment) if culprit is None else None
        if culprit is unheld is None or self._strategy.nonfinite == "allow":
            return
        if self._strategy.nonfinite == "raise" and unheld is not None:
            raise self._beyond_codec(f"the change of parameter {unheld!r} on rank {self.context.rank}")
        if self._strategy.nonfinite == "raise":
            raise non_finite(rank=self.context.rank, step=self._steps, parameter=culprit)
        self._outer.leave_out(fragment)
        self._left_out.add(fragment)
