"""A shard of the model as a state machine: it owns some parameters, the optimizer for them, and the admission rule.

A server holds one or many: across hosts one for each piece of about 1 MiB, so that a piece is updated, and sent back,
while the next one still arrives. Each is complete in itself, so nothing but bytes depends on how many there are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.aggregate import MEAN, Aggregator, Contribution, ContributionKind, can_join, join
from paceline.server.admission import AdmissionRule, Decisions, ProtocolError
from paceline.server.closing import Answer, Applied, Closed, Groups
from paceline.server.contributed import require_form
from paceline.server.standing import ShardStanding
from paceline.server.stepping import Stepping
from paceline.server.whole_updates import Round, Share, WholeUpdate


@dataclass(slots=True)
class _Given:
    """What came with one push."""

    worker: int
    clock: int
    sender: int
    contribution: Contribution | None
    """None where the push was void, or the contribution is part of an earlier one that is kept."""
    is_void: bool
    share: Share | None = None
    staleness: int = -1


@final
class Shard:
    """Applies contributions to `parameters` as the rule admits them. Sans-IO: no socket, no thread, no clock.

    Args:
        parameters: the tensors this server owns, updated in place.
        optimizer: over those tensors.
        rule: decides which contributions form an update and who may go on; each shard's own.
        aggregator: joins the contributions to an update.
        max_updates: contributions beyond this many updates are dropped.
    """

    def __init__(
        self,
        *,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        rule: AdmissionRule,
        aggregator: Aggregator = MEAN,
        max_updates: int | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.iteration = 0
        self.rule, self._aggregator = rule, aggregator
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._stepping = Stepping(self.parameters, optimizer)
        self.max_updates = max_updates
        self._sums = [torch.zeros_like(parameter, dtype=_wide(parameter.dtype)) for parameter in self.parameters]
        self._pulled_at: dict[int, int] = {}
        self._given: dict[int, _Given] = {}  # by sender
        self._kept: dict[tuple[int, int], _Given] = {}
        """By worker and clock, the first push whose worker went on before the update."""
        self._waiting: dict[int, tuple[int, _Given | None]] = {}
        """By worker, the iteration at which it is answered even if not admitted, and what it pushed last."""
        self._stop = False
        self._applied: list[Applied] = []
        self._whole = WholeUpdate()
        self._rounds: list[Applied] = []
        """Gradients of the rounds of a whole update, until it is complete."""
        self._copied: dict[int, tuple[int, int]] = {}
        """By worker, clock and staleness of the last contribution that another copy of this shard has closed."""
        self._told: dict[int, tuple[int, int]] = {}
        """The same, for contributions that this shard has closed, and told its copies of."""
        self.before_closing: Callable[[Closed], None] | None = None
        """Told of each clock before it changes anything but the rule."""

    @property
    def follows(self) -> bool:
        """Whether each push must be followed by `follow`, with what another shard decided."""
        return self.rule.follows

    @property
    def needs_all(self) -> bool:
        """Whether an update needs a gradient of every worker, and nothing else."""
        return self.rule.needs_all

    def begin_at(self, iteration: int) -> None:
        """Go on from a checkpoint that was taken after so many updates; 0: from the start."""
        self.iteration = iteration
        self.rule.begin_at(iteration)

    def push(
        self,
        worker: int,
        clock: int,
        gradients: Sequence[Tensor] | None,
        *,
        pause_at: int,
        stop: bool = False,
        groups: Groups | None = None,
        sender: int | None = None,
        weight: float = 1.0,
        kind: ContributionKind = "gradient",
        share: object = None,
    ) -> list[Answer]:
        """A contribution arrived: one tensor a parameter, or None where there is none to give for this clock.

        The tensors are read when the update is made, so they must stay as they are until the worker's answer.

        Args:
            pause_at: answer, admitted or not, once the iteration is this far.
            stop: tell every worker to stop after this clock.
            groups: what the worker's LR schedulers set, from this gradient on; one mapping for each of the optimizer's
                groups.
            sender: whom the worker pushes for; none: for itself.
            weight: of the contribution among others.
            share: as `Share`, of an update that may take several rounds.

        Raises:
            ProtocolError: the sender is not the worker's, or not at this clock; or tensors, weight or groups are not of
                this server's form.
        """
        if worker in self._copied and clock <= self._copied[worker][0]:
            return self._push_again(worker, clock, pause_at=pause_at)
        sender = worker if sender is None else sender
        contribution = None if gradients is None else Contribution(sender, weight, kind, gradients)
        require_form(worker, sender, contribution, self._shapes)
        if groups is not None and len(groups) != self._stepping.num_groups:
            own = self._stepping.num_groups
            raise ProtocolError(f"worker {worker} has {len(groups)} parameter groups, this server {own}")
        if self.rule.worker_of(sender) != worker:
            raise ProtocolError(f"worker {worker} pushed for sender {sender}, which is not its own")
        part = None if share is None else Share.of_plain(share)
        if part is not None:
            self._whole.require(part)
            if contribution is not None and not part.num_samples:
                contribution = contribution._replace(weight=0.0)
        self._stop = self._stop or stop
        self.rule.expect_pause(1 if self._stop else pause_at - self.iteration)
        contributors = self.rule.push(sender, clock)
        if groups is not None:
            self._stepping.known[worker] = (clock, groups)
        is_void = contribution is None and (part is None or part.num_samples > 0)
        self._given[sender] = given = _Given(worker, clock, sender, contribution, is_void, part)
        self._waiting[worker] = pause_at, given
        self._update(contributors)
        return list(self._answers())

    def _push_again(self, worker: int, clock: int, *, pause_at: int) -> list[Answer]:
        """A contribution that is part of this copy already, whose answer was lost with the server that made it so."""
        last, staleness = self._copied[worker]
        if clock != last:
            raise ProtocolError(f"worker {worker} pushed for clock {clock}, and has been answered for clock {last}")
        self._waiting[worker] = pause_at, _Given(worker, clock, worker, None, is_void=True, staleness=staleness)
        return list(self._answers())

    def wait(self, worker: int, *, pause_at: int) -> list[Answer]:
        """The worker asks for admission (again) without a gradient. Raises ProtocolError if the worker has left, or
        its last gradient is still waiting for others."""
        self.rule.require_active(worker)
        _, given = self._waiting.get(worker, (0, None))
        if given is not None and self.rule.is_held(given.sender):
            raise ProtocolError(f"worker {worker} asks for admission while its gradient waits for others")
        self._waiting[worker] = pause_at, None
        return list(self._answers())

    def follow(self, worker: int, clock: int, contributors: Sequence[int]) -> list[Answer]:
        """What the deciding shard answered to the worker's last push, which has come here too.

        Args:
            clock: at which the worker goes on.
            contributors: whose gradients formed the clock before.

        Raises:
            ProtocolError: this shard decides for itself, or the worker's last push is answered.
        """
        self._update(self.rule.follow(worker, clock, tuple(contributors)))
        return list(self._answers())

    def learn(self, decided: Decisions) -> list[Answer]:
        """What the deciding shard has decided, which workers that are gone since may not have said here."""
        self._update(self.rule.learn(decided))
        return list(self._answers())

    def tick(self, now_s: float) -> list[Answer]:
        """It is that late, by whatever clock the rule's `wakes_at_s` is of."""
        self._update(self.rule.tick(now_s))
        return list(self._answers())

    def join(self, worker: int) -> int:
        """The worker takes part from here on; returns its clock. Raises ProtocolError if it does already."""
        self.rule.join(worker)
        self.pulled(worker)
        return self.rule.clock_of(worker)

    def begin_with(self, worker: int, clock: int) -> list[Answer]:
        """The worker has joined, on every server, and is to push for this clock first."""
        self._update(self.rule.begin_with(worker, clock))
        return list(self._answers())

    def leave(self, worker: int) -> list[Answer]:
        """The worker pushes no more and has no answer to come; nobody waits for it from here on."""
        _, given = self._waiting.pop(worker, (0, None))
        if given is not None:
            self._let_go_on(given)
        self._update(self.rule.leave(worker))
        self._stop = self._stop or self.rule.is_over
        return list(self._answers())

    def step_aside(self, worker: int) -> list[Answer]:
        """The worker waits for all others at a place of their scripts. Raises ProtocolError if it has left."""
        self._update(self.rule.step_aside(worker))
        return list(self._answers())

    def come_back(self, worker: int) -> None:
        """All are at that place, and the worker goes on. Raises ProtocolError if it has left."""
        self.rule.come_back(worker)

    def pulled(self, worker: int) -> None:
        """The worker was given the parameters as they are now."""
        self._pulled_at[worker] = self.iteration

    @property
    def is_quiet(self) -> bool:
        """Whether all that there is to know is each worker's clock: nobody waits, none is to stop or to end, and every
        worker's next gradient would be applied alike."""
        is_idle = not (self._waiting or self._given or self._kept or self._stop or self._is_over())
        return is_idle and not self.rule.begins and self._stepping.is_alike_for(self.rule.active)

    def clocks(self) -> dict[int, tuple[int, int]]:
        """Each worker's clock, and the iteration at which it last got parameters."""
        ranks = sorted(self.rule.active.union(self.rule.members.ranks))
        return {rank: (self.rule.clock_of(rank), self._pulled_at.get(rank, 0)) for rank in ranks}

    def resume(self, iteration: int, clocks: Mapping[int, tuple[int, int]]) -> None:
        """Go on from where others have brought the quiet shard; parameters and optimizer are theirs already."""
        self.iteration = iteration
        self.rule.resume({worker: clock for worker, (clock, _) in clocks.items()})
        self._pulled_at = {worker: pulled_at for worker, (_, pulled_at) in clocks.items()}

    def counted(self, worker: int, clock: int) -> None:
        """The worker's contribution for this clock counts, without a push. It pushes again if other servers lack it,
        which an update of all workers may."""
        if self.rule.needs_all:
            self._copied[worker] = clock, 0

    def repeat(self, closed: Closed) -> None:
        """Do what another copy of this shard has done, in the same order."""
        for worker, (clock, staleness) in closed.contributors.items():
            if worker in closed.groups:
                self._stepping.known[worker] = (clock, closed.groups[worker])
            self._copied[worker] = (clock, staleness)
            self._given.pop(worker, None)  # of one that is gone, which this copy has taken itself
            self._kept.pop((worker, clock), None)
        self._stop = self._stop or closed.stop
        if closed.round is not None:
            stale = {worker: staleness for worker, (_, staleness) in closed.contributors.items()}
            self._go_through(closed.round, stale, closed.gradients)
        elif closed.gradients is not None:
            self._apply(list(closed.contributors), closed.gradients)
        self.resume(self.iteration, closed.clocks)
        for worker in closed.contributors:
            self.pulled(worker)

    @property
    def is_repeatable(self) -> bool:
        """Whether workers give again what is here and not closed, if it is lost."""
        are_there = all(each.worker in self.rule.active for each in self._given.values())
        return are_there and not self._kept and not self._whole.is_open

    def standing(self) -> ShardStanding:
        return ShardStanding(
            self.iteration,
            self.clocks(),
            counted=self._copied | self._told,
            groups=self._stepping.known,
            in_force=self._stepping.in_force,
            active=sorted(self.rule.active),
            begins=self.rule.begins,
            stop=self._stop,
            took=self._whole.took,
        )

    def stand(self, standing: ShardStanding) -> None:
        """Be a copy of a shard that stands so; parameters and optimizer are as that one's already."""
        self._copied, self._stepping.known = dict(standing.counted), dict(standing.groups)
        self._stop, self._whole.took = standing.stop, list(standing.took)
        self._stepping.use(standing.in_force)
        self.rule.admit(standing.active, standing.begins)
        self.resume(standing.iteration, standing.clocks)

    def drain_applied(self) -> list[Applied]:
        """The gradients applied since the last call."""
        applied, self._applied = self._applied, []
        return applied

    def _update(self, senders: Sequence[int]) -> None:
        """Make one update of what these have given, and others for which all is there then."""
        while senders:
            self._update_once(senders)
            senders = self.rule.due()

    def _update_once(self, senders: Sequence[int]) -> None:
        given = [self._given.pop(sender) for sender in senders]
        if self._kept:
            for each in given:
                self._kept.pop((each.worker, each.clock), None)
        if any(each.share is not None for each in given):
            self._end_round(given)
            return
        # One sender without a gradient voids the clock: what one process would do with the combined batch.
        if any(each.is_void for each in given) or self._is_over():
            self._tell_of_closing(given, None)
            return
        gradients = self._as_own(self._joined(given))
        for each in given:
            each.staleness = self.iteration - self._pulled_at.get(each.worker, 0)
        self._tell_of_closing(given, gradients)
        self._apply([each.worker for each in given], gradients)
        for each in given:
            self._applied.append(Applied(self.iteration, each.worker, each.clock, each.staleness))

    def _end_round(self, given: Sequence[_Given]) -> None:
        """A round is over, of which all who are there have given something. An update may take several."""
        shares = [each.share for each in given if each.share is not None]
        share = shares[0]._replace(num_samples=sum(each.num_samples for each in shares))
        is_void = any(each.is_void for each in given) or (share.num_samples > 0 and self._lacks_one(given))
        one = Round(given[0].clock, share, is_void)
        for each in given:
            if each.share is not None and each.share.num_samples and each.contribution is not None:
                each.staleness = self.iteration - self._pulled_at.get(each.worker, 0)
        mean = self._as_own(self._joined(given)) if share.num_samples and not one.is_void else None
        self._tell_of_closing(given, mean, one)
        self._applied += self._go_through(one, {each.worker: each.staleness for each in given}, mean)

    def _go_through(self, one: Round, staleness: Mapping[int, int], mean: Sequence[Tensor] | None) -> list[Applied]:
        """A round is over. Makes the update if that is complete, and returns the gradients of all its rounds."""
        self._rounds += [Applied(0, worker, one.clock, stale) for worker, stale in staleness.items() if stale >= 0]
        if not self._whole.end_round(one, tuple(staleness), mean):
            return []
        gradients, rounds, self._rounds = self._whole.take(), self._rounds, []
        if gradients is None or self._is_over():
            return []
        self._apply(list(staleness), self._as_own(gradients))
        return [each._replace(iteration=self.iteration) for each in rounds]

    def _lacks_one(self, given: Sequence[_Given]) -> bool:
        """Whether those with samples are too few for the aggregator, and what stands in is none, as not finite."""
        there = [each.contribution for each in given if each.contribution is not None]
        return len(there) < len(given) and not can_join(self._aggregator, there)

    def _joined(self, given: Sequence[_Given]) -> Sequence[Tensor]:
        contributions = [each.contribution for each in given if each.contribution is not None]
        return join(self._aggregator, contributions, self._sums)

    def _as_own(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """In the parameters' dtypes."""
        pairs = zip(self.parameters, gradients, strict=True)
        return [tensor if tensor.dtype == own.dtype else tensor.to(own.dtype) for own, tensor in pairs]

    def _tell_of_closing(
        self, given: Sequence[_Given], gradients: Sequence[Tensor] | None, one: Round | None = None
    ) -> None:
        if self.before_closing is None:
            return
        contributors = {each.worker: (each.clock, each.staleness) for each in given}
        self._told |= contributors
        groups = self._stepping.set_at({worker: clock for worker, (clock, _) in contributors.items()})
        self.before_closing(Closed(gradients, contributors, self.clocks(), groups, self._stop, one))

    def _apply(self, workers: Sequence[int], gradients: Sequence[Tensor]) -> None:
        # All who have set something may be gone since the first round of a whole update.
        self._stepping.step(workers, gradients, keeps=bool(self._whole.took))
        self.iteration += 1

    def _is_over(self) -> bool:
        return self.max_updates is not None and self.iteration >= self.max_updates

    def _answers(self) -> Iterator[Answer]:
        for worker, (pause_at, given) in list(self._waiting.items()):
            admitted = self.rule.is_admitted(worker)
            held = given is not None and self.rule.is_held(given.sender)
            # Without a held contribution, a worker need not be admitted to take part in a pause, nor to end.
            if not admitted and (held or not (self._stop or self.iteration >= pause_at)):
                continue
            del self._waiting[worker]
            staleness, took = -1, tuple(self._whole.took)
            if given is not None:
                staleness, took = given.staleness, took[-1:]
                self._let_go_on(given)
            yield Answer(
                worker,
                self.iteration,
                self.rule.clock_of(worker),
                staleness,
                self._stop,
                admitted,
                None if given is None else self.rule.contributors,
                took,
            )

    def _let_go_on(self, given: _Given) -> None:
        """The worker goes on and will write to its memory."""
        if self.rule.is_held(given.sender):
            self._keep(given)
        else:
            self._given.pop(given.sender, None)

    def _keep(self, given: _Given) -> None:
        """Copy what is still to be read.

        If the aggregator streams, there is one for each worker, however many senders it plays. It is not one for all
        workers: their pushes come in another order in each run, and sums in that order would have other bits. A worker
        that waits for the update has its gradient read where it lies, as before.
        """
        if given.contribution is None:
            return
        first = self._kept.setdefault((given.worker, given.clock), given)
        if first is given or first.contribution is None or not self._aggregator.streams:
            pairs = zip(given.contribution.tensors, self._sums, strict=True)
            copies = [tensor.to(like.dtype, copy=True) for tensor, like in pairs]
            given.contribution = given.contribution._replace(tensors=copies)
        else:
            first.contribution = self._aggregator.fold(first.contribution, given.contribution)
            given.contribution = None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What gradients of this dtype are summed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
