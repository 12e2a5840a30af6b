"""One worker of a gossip run: its own steps, and its exchanges with its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from paceline.codec import Auto, Codec, TensorCodec
from paceline.comm.base import Timing
from paceline.errors import PeerLost, UsageError
from paceline.messages import from_frames, to_frames
from paceline.schedule import Every
from paceline.strategies.base import Context, Recovery, StepOutcome, Synchronizer
from paceline.strategies.choosing import Choosing, LinkSpeed
from paceline.strategies.codec_choice import CodecChoice
from paceline.strategies.coding import Coding, of_neighbours, require_real
from paceline.strategies.finite import checked, may_step
from paceline.strategies.gossip.links import Links
from paceline.strategies.gossip.mixer import Mixer
from paceline.strategies.gossip.model import FlatModel
from paceline.strategies.gossip.outer_step import OuterStep
from paceline.strategies.gossip.quasi_global import QuasiGlobal
from paceline.strategies.gossip.shared_estimates import SharedEstimates
from paceline.strategies.own_state import OwnState, load_replica, of_replica
from paceline.strategies.regrouping import ResultHandedOn
from paceline.strategies.replica import Replica, is_skipped_by_scaler, require_same_parameters

if TYPE_CHECKING:
    from paceline.strategies.gossip.strategy import Gossip

_KEPT = "gossip."
_SIZE, _EXCHANGES = "size", "exchanges"


@final
class GossipSynchronizer(Synchronizer):
    """Makes the script's steps on a model of its own, and mixes it with the models of its neighbours."""

    def __init__(self, strategy: Gossip, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._strategy, self._schedule = strategy, Every(strategy.every)
        self._model = FlatModel(replica)
        self._choice = CodecChoice(of_neighbours(strategy.codec), strategy.codec_scope, self._watch)
        self._mixer = self._mixer_with(self._choice.begin(context))
        self.facts = self._choice.told(self.facts)
        self._links = Links(context.collective, context.pacing)
        self._momentum = QuasiGlobal(self._model, strategy.quasi_global) if strategy.quasi_global else None
        self._weight = 1.0
        self._has_samples = True
        self._coding = Timing()
        self._steps = 0
        self._since = 0  # steps made when the last exchange ended
        self._exchanges = 0
        self._is_apart = False  # membership has changed; workers must regroup before the next exchange
        self._has_sent_all = False  # the last exchange went without the codec, since somebody leaves
        self._agreed = torch.zeros(1 if strategy.codec is None else 2, dtype=torch.int64)
        if context.recovery is not None:
            context.recovery.last_result = lambda: to_frames([self._agreed])

    def _mixer_with(self, coding: Coding | None) -> Mixer:
        return self._plain_mixer() if coding is None else self._coded_mixer(coding.codec)

    def _plain_mixer(self) -> Mixer:
        strategy, among, own = self._strategy, self.context.collective, self._model.parcel
        if strategy.mode == "outer":
            return OuterStep(
                strategy.topology,
                own,
                rank=among.rank,
                size=among.size,
                outer=strategy.outer,
                tell=self.context.tell,
            )
        return strategy.mixer(strategy.topology, own, rank=among.rank, size=among.size)

    def _coded_mixer(self, codec: Codec) -> Mixer:
        strategy, among, own = self._strategy, self.context.collective, self._model.parcel
        assert isinstance(codec, TensorCodec)
        for segment in own.layout.segments:
            require_real(codec, segment.dtype)
        return SharedEstimates(
            strategy.topology,
            own,
            rank=among.rank,
            size=among.size,
            codec=codec,
            seed=self.context.seed,
            consensus_step=strategy.step_of(codec),
        )

    def _watch(self, auto: Auto, context: Context, coding: Coding) -> Choosing:
        among = context.collective
        near = self._strategy.topology.neighbours(0, among.rank, among.size)
        layout = self._model.parcel.layout
        count = sum(segment.num_elements for segment in layout.segments)
        speed = LinkSpeed(context, among_hosts=False, num_bytes=layout.num_bytes)
        taken_s = partial(speed.messages_s, shape=(count,), num_messages=len(near.sends_to))
        return Choosing(auto, context, taken_s)

    def _take_up_codec(self) -> None:
        """If one has been chosen. Nothing is under way."""
        if not self._choice.has_found:
            return
        if (coding := self._choice.take_up()) is not None:
            self._mixer = self._coded_mixer(coding.codec)
        self.facts = self._choice.told(self.facts)

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (*self._links.timings, self._coding)

    @property
    def owes(self) -> bool:
        return self._choice.present is not None and not self._has_sent_all

    def set_weight(self, weight: float) -> None:
        self._has_samples = weight > 0
        if not self._has_samples:  # it has nothing of its own, and trains on what is another's
            return
        self._model.scale_gradients(self._weight / weight)  # what was accumulated counts with its own batch's weight
        self._weight = weight

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self._momentum is not None:
            raise UsageError("quasi_global changes the gradients that are there; give step() no closure")
        policy, step = self._strategy.nonfinite, self._steps + 1
        return checked(partial(self._weighed, closure), self.replica, policy, rank=self.context.rank, step=step)

    def _weighed(self, closure: Callable[[], Any]) -> Any:
        """What the closure adds counts with the batch's weight, as what there is does."""
        self._model.scale_gradients(1 / self._weight)
        loss = closure()
        self._model.scale_gradients(self._weight)
        return loss

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        require_same_parameters(self.replica)
        self._model.require_in_place(rank=self.context.rank, step=self._steps + 1)
        applies = self.gradients_are_spent or may_step(
            self.replica, self._strategy.nonfinite, rank=self.context.rank, step=self._steps + 1
        )
        applies = applies and self._has_samples
        self._corrupt()
        is_due = bool(self._schedule.due(self._steps + 1))
        if is_due:
            self.require_joint_step()
        self._model.scale_gradients(self._weight)
        if self._momentum is not None:
            self._momentum.begin()
        if is_due and self._strategy.order == "awc":
            self._exchange()
        if applies:
            self._mixer.update(update)
        if is_due and self._strategy.order == "atc":
            self._exchange()
        if self._momentum is not None:
            self._momentum.end()
        self._model.scale_gradients(1 / self._weight)  # for a script that adds to them
        self._steps += 1
        self._count(exchanged=is_due)
        if is_due and self.context.recovery is None:  # otherwise choosing is a part of what is repeated
            self._choice.look()
        self._take_up_codec()
        self._start_early()
        applies = applies and not is_skipped_by_scaler(self.replica.optimizer)
        return StepOutcome(self.iteration, staleness=0 if applies else -1)

    def _exchange(self) -> None:
        recovery = self.context.recovery
        if recovery is None:
            self._mix(self._received())
        else:
            self._commit(recovery, self._steps + 1)

    def _commit(self, recovery: Recovery, steps: int) -> None:
        """Exchange until nobody dies in it or joins, each time among those who are there, and mix when all have what
        they need for it. Local steps stay as they were made. `steps`: that all have made until then, if known here.

        Where somebody is to leave, all send their models once more, as they are: what neighbours do not know yet of
        whoever leaves they would never hear."""
        lost: set[int] = set()
        self._has_sent_all = False
        self._is_apart = self._is_apart or recovery.has_given
        while True:
            try:
                if self._is_apart:
                    self.rejoin(recovery.regroup())
                lost, agreed = self._received(), self._all_have_come(steps)
                if self._choice.present is not None and agreed[1]:
                    self._mixer, self._has_sent_all = self._plain_mixer(), True
                    lost, agreed = self._received(), self._all_have_come(steps)
                self._choice.look()
                break
            except PeerLost:
                self._is_apart, self._has_sent_all = True, False
            except ResultHandedOn as handed:  # the others have mixed, since this worker, too, had received everything
                agreed = torch.zeros_like(self._agreed)
                from_frames(handed.frames, [agreed])
                break
        self._agreed = agreed
        self._mix(lost)
        if self._has_sent_all:
            self._mixer = self._mixer_with(self._choice.present)
        recovery.commit()

    def _all_have_come(self, steps: int) -> Tensor:
        """The steps that all have made, and, where something is coded, whether somebody is to leave."""
        reform = self.context.reform
        leaves = reform is not None and reform.is_asked_to_leave
        agreed = torch.tensor([steps, int(leaves)][: len(self._agreed)])
        self.context.collective.all_reduce(agreed, op="max").wait()
        return agreed

    def _count(self, *, exchanged: bool) -> None:
        """A step is over. Where workers come and go, it counts with the exchange after it; all pause there alone."""
        if exchanged:
            self._since, self._exchanges = self._steps, self._exchanges + 1
        self.iteration = self._steps if self.context.recovery is None else self._since

    def end_round(self) -> None:
        """Where workers come and go, an exchange ends each pass, so that its samples count in it."""
        if self.context.recovery is not None and self._steps > self._since:
            self._commit(self.context.recovery, self._steps)
            self._count(exchanged=True)
            self._take_up_codec()

    def leave(self) -> None:
        self.end_round()

    def enter(self) -> None:
        """With the parameters that another worker had when the others' round began."""
        assert self.context.recovery is not None
        self._commit(self.context.recovery, 0)
        self._steps = int(self._agreed[0])
        self._count(exchanged=True)
        self._take_up_codec()
        self._start_early()

    def rejoin(self, context: Context, *, facts: Mapping[str, float | str] | None = None) -> None:
        self.context = context
        if facts is not None:
            self.facts = facts
        self._links.lead_among(context.collective)
        self._begin_anew()
        self._is_apart = False

    def _begin_anew(self) -> None:
        """Among those who are there now, with the models that they have. Who codes, and on which links, follows from
        where they are, and what neighbours believe of one another does from how many they are."""
        if self._strategy.codec is None:
            self._mixer.regroup(self.context.collective.rank, self.context.collective.size)
            return
        self._mixer = self._mixer_with(self._choice.rejoin(self.context))
        self.facts = self._choice.told(self.facts)

    def _received(self) -> set[int]:
        """Returns whose messages are lost."""
        if not self._links.are_busy:
            self._start()
        return self._links.wait()

    def _mix(self, lost: set[int]) -> None:
        with self._counted(self._coding_s()[1]):
            self._mixer.mix(self._exchanges, lost)

    def _start_early(self) -> None:
        """With `awc` messages move while the next gradient is computed."""
        if self._strategy.order == "atc" or not self._schedule.due(self._steps + 1) or self._is_apart:
            return
        with self._noting_loss():
            self._start()

    def _corrupt(self) -> None:
        """Nobody attacks between a death that is noticed and the exchange, where all meet anew: before that nobody can
        be told what others send."""
        if not self._is_apart:
            with self._noting_loss():
                self._model.corrupt(self.context, step=self._steps)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Where workers come and go, note that somebody is gone; that is dealt with at the exchange."""
        try:
            yield
        except PeerLost:
            if self.context.recovery is None:
                raise
            self._is_apart = True

    def _start(self) -> None:
        with self._counted(self._coding_s()[0]):
            outgoing = self._mixer.outgoing(self._exchanges)
        self._links.start(outgoing, self._mixer.incoming(self._exchanges))

    def _coding_s(self) -> tuple[float, float]:
        return self._mixer.coding_s(self._exchanges, operation_s=self.context.pacing.operation_s)

    @contextmanager
    def _counted(self, coding_s: float) -> Iterator[None]:
        """What a codec does inside is part of the exchange, and takes so long on a simulated host."""
        pacing = self.context.pacing
        began_s = pacing.now_s()
        yield
        if coding_s:
            pacing.spend(coding_s)
            self._coding.communication_s += pacing.now_s() - began_s

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        self._links.settle()  # what is on its way is read where it lies
        with self.averaged_model() as model:
            yield model

    def own_state(self) -> dict[str, OwnState]:
        kept = dict(self._mixer.state())
        if self._momentum is not None:
            kept |= self._momentum.state()
        own = {f"{_KEPT}{name}": OwnState(tensor) for name, tensor in kept.items()}
        if self.context.recovery is not None:
            own[f"{_KEPT}{_SIZE}"] = OwnState(torch.tensor(self.context.collective.size), "same")
            own[f"{_KEPT}{_EXCHANGES}"] = OwnState(torch.tensor(self._exchanges), "same")
        return {**of_replica(self.replica), **own}

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        super().restore(state, own, iteration=iteration)
        self._steps = self._since = iteration
        self._exchanges = iteration // self._strategy.every
        load_replica(self.replica, own)
        kept = {name.removeprefix(_KEPT): tensor for name, tensor in own.items() if name.startswith(_KEPT)}
        self._mixer.load(kept)
        if self._momentum is not None:
            self._momentum.load(kept)
        if _EXCHANGES in kept:
            self._exchanges = int(kept[_EXCHANGES])
            # Weights and sums that are on links are those of as many workers as there were when they were saved.
            if self.context.size not in (1, int(kept[_SIZE])):  # one who joins is alone until it meets the others
                self._begin_anew()
