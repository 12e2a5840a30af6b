"""Gossip without steps in common: a worker takes the mean with a neighbour while both compute."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from paceline.comm.alone import AloneMailbox
from paceline.comm.base import Timing
from paceline.comm.mailbox import Mailbox
from paceline.elastic import Done
from paceline.errors import PeerLost, UsageError
from paceline.seeding import derive
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer, option
from paceline.strategies.finite import checked, may_step
from paceline.strategies.gossip.allowance import dealt
from paceline.strategies.gossip.model import FlatModel
from paceline.strategies.gossip.pairing import Pairing, askers
from paceline.strategies.gossip.parcel import Parcel
from paceline.strategies.gossip.reunion import Agreed, Word, agree
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

    In an elastic run workers that are left when others die, or join, meet anew between two of their own steps.

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
            meets_anew=True,
            passes_attacks=True,
        )

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        return PairSynchronizer(self, context, replica)


@final
class PairSynchronizer(Synchronizer):
    """The parameters are what gradients are computed of, and `Pairing.model` what neighbours see. A step brings the
    two together."""

    def __init__(self, strategy: AsynchronousGossip, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._nonfinite, self._topology = strategy.nonfinite, strategy.topology
        self._model = FlatModel(replica)
        self._enters = context.reform is not None and context.reform.joins  # and has taken no step yet
        self._began_at = -1 if self._enters else 0  # the iteration from which gradients are counted
        self._gone: dict[int, tuple[int, Done]] = {}  # of workers: gradients, and how far others have their work
        self._ranks: Sequence[int] = ()
        self._had: tuple[Done, ...] = ()  # as `Pairing.done`, of the parameters
        self._pairing = self._paired(self._model.parcel.alike(), counts={}, done={})
        self._mailbox = self._connected()
        self._overlap = Overlap(self._mailbox.timing, now_s=context.pacing.now_s)
        self._active: Sequence[int] = range(context.size)
        self._met_at = tuple(self._pairing.counts)  # what all had applied in the last pause
        self._read_at = 0  # the iteration known when the parameters were read
        self._num_steps = 0
        self._is_admitted = self._is_dealt = False
        self._dealt_until = 0
        self._computes = self._has_left = False  # as `Word` has them
        self._finals: list[Done] | None = None  # what all have done at the end, and the mean model has
        if context.reunion is not None:
            context.reunion.had = lambda: dict(zip(self._ranks, self._had, strict=True))

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (self._mailbox.timing, self.context.collective.timing, self._overlap.timing)

    def start(self) -> None:
        self._pairing.model.buffer.copy_(self._model.parcel.buffer)
        self._model.accept(looks_closely=True)
        self._read_at = self._known
        if self.context.done is not None:  # all have what a checkpoint has of each
            done = self.context.done()
            own = [*done._replace(steps=done.steps - 1)]
            self._pairing.done = [Done(*each) for each in self.context.collective.all_gather_object(own)]
        self._note_had()
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
        staleness = -1
        with self._turn(computes=True):
            pairing = self._pairing
            if not self._is_dealt:
                self._deal(pause_at)
            self._model.parcel.buffer.copy_(pairing.model.buffer)
            if applies and self._is_admitted:
                staleness = self._known - self._read_at
                update()
                pairing.model.buffer.copy_(self._model.parcel.buffer)
            if is_skipped_by_scaler(self.replica.optimizer):
                staleness = -1
            if self._is_admitted and self.context.done is not None:
                pairing.done[self._place] = self.context.done()
            if staleness >= 0:
                pairing.counts[self._place] += 1
                self._admit()
            self._read_at = self.iteration = self._known
            self._note_had()
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
            self._enters = False
            if self._is_dealt:  # as one who has joined since all met last
                self._admit()
            else:
                self._deal(pause_at)
            self._read_at = self._known
            return self._outcome(pause_at, staleness=0)

    def meet(self, iteration: int, *, active: Sequence[int]) -> int:
        pairing, collective = self._pairing, self.context.collective
        with self._mailbox.turn():
            self._wait_for_answer()
            pairing.is_in = self._is_dealt = False
        pairing.counts = collective.all_gather_object(pairing.counts[self._place])  # nothing is under way now
        self._active, self._met_at = active, tuple(pairing.counts)
        if not active and pairing.done:
            self._finals = [Done(*each) for each in collective.all_gather_object([*pairing.done[self._place]])]
        self._model.parcel.buffer.copy_(pairing.model.buffer)
        self._note_had()
        self._model.accept(looks_closely=True)
        self.iteration = self._known
        return self.iteration

    def leave(self) -> None:
        self._has_left = True
        with self._turn(computes=False):
            self._pairing.is_in = False
            self.iteration = self._known

    def rejoin(self, context: Context, *, facts: Mapping[str, float | str] | None = None) -> None:
        """Each goes on with the model that it has. Of those who are gone counts what others have of them."""
        assert context.reunion is not None
        self._mailbox.close()  # all answers have come
        self.context = context
        said = context.collective.all_gather_object(self._word().plain)
        everyone = [Word.of_plain(each) for each in said]
        agreed = agree(everyone)
        context.reunion.leave_to_others(agreed.gone)
        self._take_place(agreed, everyone[context.collective.rank])
        timing, self._mailbox = self._mailbox.timing, self._connected()
        self._mailbox.timing = timing
        self._mailbox.open(self._pairing.receive)

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        try:
            with self.averaged_model() as model:
                if self._finals is not None:
                    self._pairing.done = self._finals
                yield model
        finally:
            self._model.accept(looks_closely=True)

    def own_state(self) -> dict[str, OwnState]:
        return of_replica(self.replica)

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        super().restore(state, own, iteration=iteration)
        load_replica(self.replica, own)
        if self._began_at >= 0:
            self._began_at = iteration
        self._pairing.model.buffer.copy_(self._model.parcel.buffer)
        self._model.accept(looks_closely=True)

    def close(self) -> None:
        self._mailbox.close()

    # --- within a turn -------------------------------------------------------------------------------------------

    @property
    def _known(self) -> int:
        """The iteration, as far as gradients that others have applied are known here."""
        return self._began_at + sum(count for count, _ in self._gone.values()) + sum(self._pairing.counts)

    @property
    def _place(self) -> int:
        """Of this worker, among those who are there."""
        return self._ranks.index(self.context.rank)

    def _note_had(self) -> None:
        self._had = tuple(self._pairing.done)

    def _deal(self, pause_at: int) -> None:
        """Share out the gradients until the next pause, as every worker does with what it learnt in the last one."""
        iteration = self._known - sum(self._pairing.counts) + sum(self._met_at)
        total = pause_at - iteration
        if pause_at != self._dealt_until:
            total = max(total, len(self._active))
        if self.context.max_steps is not None:
            total = min(total, self.context.max_steps - iteration)
        shares = dealt(total, [self._met_at[place] + 1 for place in self._active])
        self._pairing.left = dict(zip(self._active, shares, strict=True)).get(self._place, 0)
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
        """Raises PeerLost if who owes it is gone."""
        other = self._pairing.asked
        if other is not None:
            what = f"the answer of rank {self._ranks[other]}"
            self._mailbox.wait(lambda: self._pairing.asked is None, what, sender=other)

    def _outcome(self, pause_at: int, *, staleness: int) -> StepOutcome:
        pauses = not self._is_admitted or self._known >= pause_at
        return StepOutcome(
            self._known, self._pairing.stop, staleness, admitted=not pauses, meets=pauses and not self._pairing.stop
        )

    # --- where others are gone, or join ---------------------------------------------------------------------------

    @contextmanager
    def _turn(self, *, computes: bool) -> Iterator[None]:
        """A turn of the mailbox, once this worker has the answer that it is owed, and all have met anew where that is
        due.

        Args:
            computes: this worker has a gradient that it is to apply.
        """
        while True:
            with self._mailbox.turn():
                with suppress(PeerLost) if self.context.reunion is not None else nullcontext():
                    self._wait_for_answer()
                if not self._is_reunion_due:
                    yield
                    return
            self._meet_anew(computes=computes)

    @property
    def _is_reunion_due(self) -> bool:
        reunion = self.context.reunion
        return reunion is not None and (reunion.is_due or self._mailbox.has_ended)

    def _meet_anew(self, *, computes: bool) -> None:
        assert self.context.reunion is not None
        self._computes = computes
        while True:
            try:
                self.rejoin(self.context.reunion.meet())
                break
            except PeerLost:  # one more
                pass
        self._computes = False

    def _word(self) -> Word:
        """What this worker says of itself, with what it knows of those it has been with."""
        context, pairing = self.context, self._pairing
        assert context.reunion is not None
        joins = self._began_at < 0
        counts = {rank: count for rank, (count, _) in self._gone.items()}
        done = {rank: done for rank, (_, done) in self._gone.items()}
        counts |= dict(zip(self._ranks, pairing.counts, strict=True))
        done |= context.reunion.taken if joins else dict(zip(self._ranks, pairing.done, strict=True))
        done.pop(context.rank, None)
        computes = self._computes and (self._is_admitted or not self._is_dealt)
        return Word(
            rank=context.rank,
            began_at=self._began_at,
            counts=counts,
            done=done,
            computes=computes,
            trains=computes or self._enters,
            has_left=self._has_left,
            dealt_until=self._dealt_until if self._is_dealt else 0,
            stop=pairing.stop,
        )

    def _take_place(self, agreed: Agreed, said: Word) -> None:
        """Among those who are there now. What this worker's model has of the living stays its own affair."""
        before, reunion = self._pairing, self.context.reunion
        assert reunion is not None
        joins = self._began_at < 0
        done = dict(reunion.taken) if joins else dict(zip(self._ranks, before.done, strict=True))
        had = done if joins else dict(zip(self._ranks, self._had, strict=True))
        self._began_at = agreed.began_at
        self._gone = {rank: (agreed.counts[rank], done_of) for rank, done_of in agreed.gone.items()}
        self._pairing = pairing = self._paired(before.model, counts=agreed.counts, done=done)
        self._had = tuple(had.get(rank, Done()) for rank in self._ranks)
        self._active, self._met_at = agreed.active, tuple(pairing.counts)
        pairing.stop = agreed.stop
        self._is_dealt = bool(said.trains and agreed.dealt_until)
        if self._is_dealt:
            self._dealt_until, pairing.left = agreed.dealt_until, agreed.shares.get(self._place, 0)
            self._is_admitted = said.computes
            pairing.is_in = said.computes or pairing.left > 0
        self.iteration = self._known

    def _paired(self, model: Parcel, *, counts: Mapping[int, int], done: Mapping[int, Done]) -> Pairing:
        """This worker among those who are there, with what is known of each."""
        context = self.context
        self._ranks = ranks = context.membership.ranks
        place, size = ranks.index(context.rank), len(ranks)
        self._near = sorted(self._topology.neighbours(0, place, size).sends_to)
        self._asks = bool(self._near) and askers(self._topology, size)[place]
        known = [done.get(rank, Done()) for rank in ranks] if context.reunion is not None else []
        pairing = Pairing(model, rank=place, size=size, done=known)
        pairing.counts = [counts.get(rank, 0) for rank in ranks]
        return pairing

    def _connected(self) -> Mailbox:
        context = self.context
        if context.size == 1:
            return AloneMailbox()
        if context.connect_mailbox is None:
            raise UsageError("this world has no mailboxes; start the script with `paceline run --strategy ad-psgd`")
        return context.connect_mailbox(context.collective, context.membership)
