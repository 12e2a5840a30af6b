"""Gossip without steps in common: a worker takes the mean with a neighbour while both compute."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from paceline.comm.alone import AloneMailbox
from paceline.comm.base import Timing
from paceline.errors import UsageError
from paceline.seeding import derive
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer, option
from paceline.strategies.finite import checked, may_step
from paceline.strategies.gossip.allowance import dealt
from paceline.strategies.gossip.model import FlatModel
from paceline.strategies.gossip.pairing import Pairing, askers
from paceline.strategies.overlap import Overlap
from paceline.strategies.own_state import OwnState, load_replica, of_replica
from paceline.strategies.replica import Replica, is_skipped_by_scaler, require_same_parameters
from paceline.strategies.traits import Neighbouring, Traits
from paceline.topology import Ring, Topology


@final
@dataclass(frozen=True, kw_only=True)
class AsynchronousGossip(Strategy):
    """AD-PSGD (Lian et al., ICML 2018): nobody waits for a slower worker.

    Neighbours fall into those who ask and those who answer. With each gradient an asker and one of its neighbours,
    drawn anew, take the mean of their models, which travels while the gradient is computed. Unlike there, any optimizer
    of the script may make the steps.

    An iteration is one gradient that is applied. Its staleness is how many of others' have come into the worker's model
    since its parameters were read.

    >>> AsynchronousGossip(topology=Ring()).traits.unit
    'gradient'
    """

    topology: Topology = option(
        Ring(), "with whom: ring (of an even number), chain, star, tree, hypercube, or any other of two groups"
    )
    own_scores: bool = option(True, "each worker evaluates its own model, too")

    def check(self, *, num_workers: int) -> None:
        try:
            askers(self.topology, num_workers)
            joins_all = self.topology.joins_all(num_workers)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if not joins_all:
            raise UsageError(f"under {self.topology} some of {num_workers} workers never hear of some others")

    @property
    def traits(self) -> Traits:
        moved = Neighbouring(topology=self.topology, behind_computing=True)
        return Traits(
            lock_step=False,
            unit="gradient",
            tells_stop=True,
            traffic=(moved,),
            workers_differ=True,
            own_scores=self.own_scores,
            passes_attacks=True,
        )

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return _PairSynchronizer(self, context, replica)


@final
class _PairSynchronizer(Synchronizer):
    """The parameters are what gradients are computed of, and `Pairing.model` what neighbours see. A step brings the
    two together."""

    def __init__(self, strategy: AsynchronousGossip, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._nonfinite = strategy.nonfinite
        self._model = FlatModel(replica)
        rank, size = context.rank, context.size
        self._pairing = Pairing(self._model.parcel.alike(), rank=rank, size=size)
        self._near = sorted(strategy.topology.neighbours(0, rank, size).sends_to)
        self._asks = bool(self._near) and askers(strategy.topology, size)[rank]
        if context.connect_mailbox is None and size > 1:
            raise UsageError("this world has no mailboxes; start the script with `paceline run --strategy ad-psgd`")
        self._mailbox = context.connect_mailbox() if context.connect_mailbox is not None else AloneMailbox()
        self._overlap = Overlap(self._mailbox.timing, now_s=context.pacing.now_s)
        self._active: Sequence[int] = range(size)
        self._met_at = tuple(self._pairing.counts)  # what all had applied in the last pause
        self._began_at = 0  # the iteration from which gradients are counted
        self._read_at = 0  # the iteration known when the parameters were read
        self._num_steps = 0
        self._is_admitted = self._is_dealt = False
        self._dealt_until = 0

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (self._mailbox.timing, self.context.collective.timing, self._overlap.timing)

    def start(self) -> None:
        self._pairing.model.buffer.copy_(self._model.parcel.buffer)
        self._model.accept(looks_closely=True)
        self._read_at = self._known
        self._mailbox.open(self._pairing.receive)

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        return checked(closure, self.replica, self._nonfinite, rank=self.context.rank, step=self._num_steps + 1)

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        self._num_steps += 1
        rank, step = self.context.rank, self._num_steps
        require_same_parameters(self.replica)
        self._model.require_in_place(rank=rank, step=step)
        self._model.require_untouched(rank=rank, step=step)
        applies = may_step(self.replica, self._nonfinite, rank=rank, step=step)
        self._model.corrupt(self.context, step=step)
        wants_stop = self.stop_vote()
        self._overlap.end()
        pairing, staleness = self._pairing, -1
        with self._mailbox.turn():
            if not self._is_dealt:
                self._deal(pause_at)
            self._wait_for_answer()
            self._model.parcel.buffer.copy_(pairing.model.buffer)
            if applies and self._is_admitted:
                staleness = self._known - self._read_at
                update()
                pairing.model.buffer.copy_(self._model.parcel.buffer)
            if is_skipped_by_scaler(self.replica.optimizer):
                staleness = -1
            if staleness >= 0:
                pairing.counts[rank] += 1
                self._admit()
            self._read_at = self.iteration = self._known
            pairing.stop = pairing.stop or wants_stop
            if pairing.stop:
                self._tell()
            elif self._asks:
                self._ask()
            outcome = self._outcome(pause_at, staleness=staleness)
        self._model.accept()
        return outcome

    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        """Between two pauses as many gradients are applied as there are iterations until the second one, or one by
        each worker if that is more."""
        with self._mailbox.turn():
            self._deal(pause_at)
            self._read_at = self._known
            return self._outcome(pause_at, staleness=0)

    def meet(self, iteration: int, *, active: Sequence[int]) -> int:
        pairing, collective = self._pairing, self.context.collective
        with self._mailbox.turn():
            self._wait_for_answer()
            pairing.is_in = self._is_dealt = False
        pairing.counts = collective.all_gather_object(pairing.counts[self.context.rank])  # nothing is under way now
        self._active, self._met_at = active, tuple(pairing.counts)
        self._model.parcel.buffer.copy_(pairing.model.buffer)
        self._model.accept(looks_closely=True)
        self.iteration = self._known
        return self.iteration

    def leave(self) -> None:
        with self._mailbox.turn():
            self._wait_for_answer()
            self._pairing.is_in = False
            self.iteration = self._known

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        try:
            with self.averaged_model() as model:
                yield model
        finally:
            self._model.accept(looks_closely=True)

    def own_state(self) -> dict[str, OwnState]:
        return of_replica(self.replica)

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        super().restore(state, own, iteration=iteration)
        load_replica(self.replica, own)
        self._began_at = iteration

    def close(self) -> None:
        self._mailbox.close()

    # --- within a turn -------------------------------------------------------------------------------------------

    @property
    def _known(self) -> int:
        """The iteration, as far as gradients that others have applied are known here."""
        return self._began_at + sum(self._pairing.counts)

    def _deal(self, pause_at: int) -> None:
        """Share out the gradients until the next pause, as every worker does with what it learnt in the last one."""
        iteration = self._began_at + sum(self._met_at)
        total = pause_at - iteration
        if pause_at != self._dealt_until:
            total = max(total, len(self._active))
        if self.context.max_steps is not None:
            total = min(total, self.context.max_steps - iteration)
        shares = dealt(total, [self._met_at[rank] + 1 for rank in self._active])
        self._pairing.left = dict(zip(self._active, shares, strict=True)).get(self.context.rank, 0)
        self._pairing.is_in, self._dealt_until, self._is_dealt = True, pause_at, True
        self._admit()

    def _admit(self) -> None:
        """Take the next gradient from those that are left; without any, this worker waits in a pause."""
        self._is_admitted = self._pairing.is_in = self._pairing.left > 0
        self._pairing.left -= self._is_admitted

    def _ask(self) -> None:
        draw = random.Random(derive(self.context.seed, "pair", self.context.rank, self._num_steps))
        other = draw.choice(self._near)
        self._mailbox.send(self._pairing.ask(other), destination=other)
        self._overlap.begin()

    def _tell(self) -> None:
        """This worker stops: its neighbours are to do so, too."""
        for other in self._near:
            self._mailbox.send(self._pairing.word(), destination=other)

    def _wait_for_answer(self) -> None:
        self._mailbox.wait(lambda: self._pairing.asked is None, f"the answer of rank {self._pairing.asked}")

    def _outcome(self, pause_at: int, *, staleness: int) -> StepOutcome:
        pauses = not self._is_admitted or self._known >= pause_at
        return StepOutcome(
            self._known, self._pairing.stop, staleness, admitted=not pauses, meets=pauses and not self._pairing.stop
        )
