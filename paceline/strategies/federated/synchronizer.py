"""One worker of a federated run: it plays clients in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from paceline.correction import Control, correct
from paceline.errors import NonFiniteGradient, PeerLost, UsageError
from paceline.roster import Roster, Turn
from paceline.seeding import derive, seed_everything
from paceline.strategies.base import Context, StepOutcome, Synchronizer
from paceline.strategies.context import Redealing
from paceline.strategies.federated.clients import Clients
from paceline.strategies.federated.guard import Guard
from paceline.strategies.federated.private import private_names
from paceline.strategies.federated.remembering import require_room
from paceline.strategies.federated.round_result import RoundResult
from paceline.strategies.federated.sent import Sent
from paceline.strategies.federated.server import ServerModel
from paceline.strategies.federated.uploading import Upload
from paceline.strategies.finite import checked, may_step
from paceline.strategies.global_model import averaged
from paceline.strategies.own_state import OwnState
from paceline.strategies.regrouping import ResultHandedOn
from paceline.strategies.replica import Replica, cannot_evaluate, is_skipped_by_scaler, require_same_parameters

if TYPE_CHECKING:
    from paceline.strategies.federated.strategy import Federated


@dataclass
class _Playing:
    """The turn that is under way."""

    turn: Turn
    controls: list[Control]
    rates: list[float]
    """The sum of the learning rates of those steps for which each shared parameter had a gradient, if it has a
    control."""
    num_batches_before: int
    """That the script had been handed when it began."""
    num_steps: int = 0


@final
class FederatedSynchronizer(Synchronizer):
    """The round that is under way has the number `iteration`; whom a worker plays in it, the roster says."""

    def __init__(self, strategy: Federated, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        assert context.roster is not None, "strategies with clients are given a roster"
        self._strategy, self._roster = strategy, context.roster
        private = private_names(replica.model, strategy.private)
        if strategy.privacy is not None and not replica.is_first:
            raise UsageError("privacy is accounted for one optimizer, and several were prepared; prepare one")
        if (context.server or context.clients) and not replica.is_first:
            raise UsageError("clients elsewhere exchange one optimizer's model, and several were prepared; prepare one")
        if strategy.reject is not None and not replica.is_first:
            raise UsageError("reject judges one optimizer's changes, and several were prepared; prepare one")
        self._guard = self._guarded(context, context.roster)
        codec = strategy.codec_of_clients()
        apart = context.server or context.clients
        seed = apart.coding_seed if apart is not None else context.seed
        self._upload = Upload(codec, seed=seed) if codec is not None else None
        self._server = ServerModel(
            context,
            replica,
            outer=strategy.outer,
            aggregator=strategy.aggregate,
            private=private,
            has_controls=strategy.has_controls,
            guard=self._guard,
            masks=strategy.secure,
            reject=strategy.reject,
            upload=self._upload,
            normalises=strategy.normalise,
            allows_nonfinite=strategy.nonfinite == "allow",
        )
        if strategy.aggregate.remembers:
            require_room(strategy.clients, self._server.parameters)
        self._clients = Clients(
            replica,
            private=private,
            shared_controls=self._server.controls,
            keeps_optimizer=strategy.optimizer == "kept",
            by_all=context.redealing is not None,
        )
        self._upload_bytes = self._server.upload_bytes
        if self._upload is not None:
            plain = sum(change.nbytes for change in self._server.parameters)
            self.facts = {"upload_bytes": self._upload.num_bytes(self._server.parameters), "uncoded_bytes": plain}
        self._playing: _Playing | None = None
        self._sent: Sent | None = None
        self._num_played = 0  # of this round's turns
        self._num_steps = 0
        self._is_over = False
        self._awaits_turn = False  # of a server elsewhere
        self._is_apart = False  # somebody is gone or comes, and those who are there have not met yet
        self._last: RoundResult | None = None
        if context.redealing is not None:
            context.redealing.last_result = lambda: self._last.frames if self._last is not None else ()

    def _guarded(self, context: Context, roster: Roster) -> Guard | None:
        """Where clients and server are apart, noise on sums is the server's alone, and a client's own is its own."""
        privacy = self._strategy.privacy
        if privacy is None:
            return None
        is_on_sum = privacy.on_sum(num_expected=self._strategy.clients) is not None
        if (context.server is not None and is_on_sum) or (context.clients is not None and not is_on_sum):
            return None
        return Guard(privacy, roster, seed=context.seed)

    # --- turns ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._server.require_judge()
        if not self.iteration and self.context.server is None:
            self._server.take_up()
        if self.context.server is not None:
            self._server.begin(num_samples=self._roster.turn(0).num_samples)
            self._await_turn()

    def end_turn(self) -> StepOutcome:
        if self._playing is not None:
            self._contribute(self._playing)
            if self._to_play():
                self._server.load()
            elif self.context.server is not None:
                self._end_own_round()
            else:
                self._join(leaves=False)
        return self._where()

    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        """This worker has no client in the round, which it ends at once, unless others have left it some."""
        if self._awaits_turn:
            self._await_turn()
        elif not self._to_play():
            self._join(leaves=False)
        return self._where()

    def begin_turn(self) -> None:
        turn = self._to_play()[0]
        if turn.behind:
            self._server.load(behind=turn.behind)
        controls = self._clients.load(turn.client)
        for parameter in self.replica.parameters:
            parameter.grad = None  # what is left of another client's batches
        self._playing = _Playing(turn, controls, [0.0] * len(controls), self.progress().num_batches)
        seed_everything(derive(self.context.seed, "turn", turn.round, turn.client))

    @property
    def sender(self) -> int:
        assert self._playing is not None, "batches come in turns"
        return self._playing.turn.client

    def require_between_rounds(self, place: str) -> None:
        if self._num_played:
            raise UsageError(
                f"{place}: rank {self.context.rank} has {len(self._to_play())} of its clients left in round "
                f"{self.iteration + 1}, whose end all others wait for; meet when a round is over"
            )

    def leave(self) -> None:
        """The script ended by itself; the run ends with this round, on all workers."""
        if self.context.server is not None:
            self.context.server.leave()
        else:
            self._join(leaves=True)

    @property
    def owes(self) -> bool:
        return self._playing is not None or self._num_played > 0

    def enter(self) -> None:
        """In the round that is under way this worker plays what others have left, if they have left it anything."""
        if not self._to_play():
            self._join(leaves=False)

    def rejoin(self, context: Context, *, facts: Mapping[str, float | str] | None = None) -> None:
        self.context = context
        words = context.collective.all_gather_object(self._roster.word(self.iteration))
        self._server.join_among(context, comes=facts is not None)
        self._roster.deal_anew(self.iteration, context.membership, words)
        self._is_apart = False

    def _to_play(self) -> tuple[Turn, ...]:
        """This worker's turns that are left in the round."""
        return self._roster.of_round(self.iteration)[self._num_played :]

    def _where(self) -> StepOutcome:
        admitted = not self._awaits_turn and bool(self._to_play())
        return StepOutcome(self.iteration, stop=self._is_over, admitted=admitted)

    def _end_own_round(self) -> None:
        """A client whose server is elsewhere saves what it keeps before its update leaves: if it is ended while it
        waits for its next turn, which may be long, it has kept what counts, and it draws no noise twice."""
        self.iteration += 1
        self._num_played, self._awaits_turn = 0, True

    def _await_turn(self) -> None:
        self._awaits_turn = False
        self._server.send()
        self._look_at_budget()
        if self._is_over and self._strategy.secure is None:  # under masks others need it until the round is over
            self.leave()
        else:
            self._is_over = self._server.next_turn()
            self._settle()
            self._look_at_budget()
        self._server.load()

    def _contribute(self, playing: _Playing) -> None:
        """The turn is over."""
        self._playing = None
        self._num_played += 1
        turn, strategy = playing.turn, self._strategy
        changes, of_buffers = self._server.changes(), self._server.changes_of_buffers()
        culprit = self._server.first_nonfinite([*changes, *of_buffers]) or self._clients.first_nonfinite()
        if culprit is not None and strategy.nonfinite == "raise":
            raise _non_finite_change(turn, culprit, rank=self.context.rank)
        if (culprit is not None and strategy.nonfinite == "skip") or not playing.num_steps:
            self._clients.put_back(turn.client)
            return
        controls = self._kept_controls(playing, changes)
        growth = [after - before.own for after, before in zip(controls, playing.controls, strict=True)]
        known: list[Tensor] = []
        left: list[Tensor] = []
        coded: list[Tensor] = []
        if self._upload is not None:
            known, server = self._clients.left_of(turn.client), self.context.server
            client, number = (turn.client, turn.round) if server is None else (server.client, server.round)
            changes, left, coded = self._upload.passed(changes, known, client=client, round_number=number)
        if self.context.server is None:
            self._clients.keep(turn.client, controls, left)
        else:
            self._clients.keep(turn.client, [control.own for control in playing.controls], known)
            self._sent = Sent(self.context.server.round, turn.client, controls, left)
        if turn.behind:
            factor = strategy.sampler.factor(turn.behind)
            changes = [factor * change for change in changes]
        weight = float(turn.num_samples if strategy.weights == "samples" else 1) * turn.times
        scale = self._path_length(playing) if strategy.normalise else 1.0
        number = turn.round
        rest = [*of_buffers, *growth]
        self._server.contribute(
            turn.client, changes, rest, weight=weight, scale=scale, round_number=number, coded=coded
        )
        if self.context.server is None and self.context.pacing.is_simulated:
            self._carry()

    def _carry(self) -> None:
        """Let the simulated time pass in which a client's change is encoded, sent to the server, and decoded."""
        pacing, timing = self.context.pacing, self.context.collective.timing
        if self._upload is not None:
            pacing.spend(self._upload.coding_s(self._server.parameters, operation_s=pacing.operation_s))
        timing.communication_s += pacing.carry(self._upload_bytes)
        timing.moved_bytes += self._upload_bytes

    def _kept_controls(self, playing: _Playing, changes: list[Tensor]) -> list[Tensor]:
        correction = self._strategy.correction
        if correction is None or not playing.controls:
            return []
        return [
            correction.kept(control, change / rate) if rate else control.own
            for control, change, rate in zip(playing.controls, changes, playing.rates, strict=True)
        ]

    def _path_length(self, playing: _Playing) -> float:
        """How many plain steps the turn's steps are worth, with the script's momentum (Wang et al., NeurIPS 2020,
        section 4.1, the sum of the weights with which gradients enter what a client changed)."""
        steps = playing.num_steps
        momentum = float(self.replica.optimizer.param_groups[0].get("momentum", 0.0))
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)

    def _join(self, *, leaves: bool) -> None:
        """End the round, unless turns have come to this worker that others have left."""
        num_clients = self._roster.participation.num_clients
        num_kept = self.iteration + 1 - self._roster.oldest(self.iteration + 1)
        redealing = self.context.redealing
        if leaves:
            self.context.collective.set_deadline(None)  # the others may have many steps to go
        if redealing is None:
            has_contributed, self._is_over = self._server.join(
                round_number=self.iteration, num_clients=num_clients, leaves=leaves, num_kept=num_kept
            )
        else:
            result = self._repeated(redealing, leaves=leaves)
            if result is None:
                self._server.load()
                return
            if not self.context.collective.completes_alike:  # another worker may have missed it
                self._last = result.copied()
            redealing.commit(result.joined.trained)
            self._clients.end_round(result.kept)
            has_contributed, self._is_over = self._server.step_with(
                result.joined, round_number=self.iteration, num_clients=num_clients, num_kept=num_kept
            )
        self._tell_late()
        self.iteration += has_contributed or not self._is_over
        self._look_at_budget()
        self._num_played = 0
        self._server.load()

    def _repeated(self, redealing: Redealing, *, leaves: bool) -> RoundResult | None:
        """Exchange what this worker's clients have contributed until nobody dies in it or joins, each time among those
        who are there. Returns nothing where turns have come to this worker that it has to play before."""
        self._is_apart = self._is_apart or redealing.has_given
        while True:
            try:
                if self._is_apart:
                    self.rejoin(redealing.regroup())
                    if self._to_play() and not leaves:
                        return None
                if leaves or self._is_apart:  # others may have whole turns to play; launchers end who is dead or silent
                    self.context.collective.set_deadline(None)
                kept = self._clients.gathered(self.context.collective) if self._strategy.keeps_state else {}
                joined = self._server.joined(round_number=self.iteration, leaves=leaves, trained=redealing.trained)
                return RoundResult(joined, kept)
            except PeerLost:
                self._is_apart = True
            except ResultHandedOn as handed:  # the others are a round further, and wait for this worker
                self._is_apart = True
                return RoundResult.of_frames(handed.frames)

    def _tell_late(self) -> None:
        late = self._roster.late(self.iteration)
        if late and self.context.tell is not None and not self._is_over:
            self.context.tell("late", {"round": self.iteration + 1, "clients": late})

    def _settle(self) -> None:
        """A client whose server is elsewhere learns with its next turn whether its update counted. If it was late or
        refused, or is of a round that begins again, controls, and what a codec left out, stay as they were."""
        sent, server = self._sent, self.context.server
        if sent is not None and server is not None and server.counted >= sent.round:
            self._clients.amend(sent.client, sent.controls, sent.left)
        self._sent = None

    def _look_at_budget(self) -> None:
        """The run ends before the round that it cannot afford."""
        if self._guard is not None and self._guard.is_spent(self.iteration + 1):
            self._is_over, self.ended_by = True, "privacy"

    # --- steps ------------------------------------------------------------------------------------------------

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self._strategy.correction is not None or self._strategy.alternates:
            raise cannot_evaluate(self.replica.optimizer)
        nonfinite, rank = self._strategy.nonfinite, self.context.rank
        return checked(closure, self.replica, nonfinite, rank=rank, step=self._num_steps + 1)

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        require_same_parameters(self.replica)
        if self.context.server is not None:
            self.context.server.pulse()
        strategy, playing = self._strategy, self._playing
        if playing is None:
            raise UsageError(
                f"rank {self.context.rank}: a step came when the pass over the loader had ended, and with it the "
                "client's turn; step inside the loop, and ask for a batch when the one before is done "
                "(DataLoader(num_workers=...) reads ahead by itself)"
            )
        self._num_steps += 1
        applies = may_step(self.replica, strategy.nonfinite, rank=self.context.rank, step=self._num_steps)
        if applies:
            if strategy.correction is not None:
                controls = playing.controls if strategy.has_controls else None
                correct(strategy.correction, self._server.trained, self._server.anchors, controls)
            if strategy.alternates:
                with self._resting(playing):
                    update()
            else:
                update()
        if not applies or is_skipped_by_scaler(self.replica.optimizer):
            return StepOutcome(self.iteration, staleness=-1)
        playing.num_steps += 1
        if playing.controls:
            self._add_rates(playing)
        return StepOutcome(self.iteration, staleness=playing.turn.behind)

    def _add_rates(self, playing: _Playing) -> None:
        rates = [float(group["lr"]) for group in self.replica.optimizer.param_groups]
        for index, (parameter, group) in enumerate(zip(self._server.trained, self._server.groups, strict=True)):
            if parameter.grad is not None:
                playing.rates[index] += rates[group]

    @contextmanager
    def _resting(self, playing: _Playing) -> Iterator[None]:
        """Private and shared layers take turns: those that rest have no gradient meanwhile. Batches tell whose turn it
        is, since a step may be of several."""
        num_batches = self.progress().num_batches - playing.num_batches_before
        is_private_first = num_batches <= self._strategy.private_epochs * playing.turn.num_batches
        shared = set(map(id, self._server.trained))
        resting = [each for each in self.replica.parameters if (id(each) in shared) == is_private_first]
        gradients = [parameter.grad for parameter in resting]
        for parameter in resting:
            parameter.grad = None
        yield
        for parameter, gradient in zip(resting, gradients, strict=True):
            parameter.grad = gradient

    # --- state ------------------------------------------------------------------------------------------------

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """The server's model. Private layers are the mean of those that workers have in place."""
        with self._server.in_place(), averaged(self._clients.private.values(), self.context.collective):
            yield self.replica.model

    @property
    def measures(self) -> Mapping[str, float]:
        return {"epsilon": self._guard.epsilon(self.iteration)} if self._guard is not None else {}

    def own_state(self) -> dict[str, OwnState]:
        sent = self._sent.own_state() if self._sent is not None else {}
        return {**self._server.own_state(), **self._clients.own_state(), **sent}

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        self.iteration = iteration
        self._server.restore(own)
        self._clients.restore(own)
        self._sent = Sent.restored(own)
        self._look_at_budget()

    def close(self) -> None:
        self._clients.close()
        self._server.close()


def _non_finite_change(turn: Turn, name: str, *, rank: int) -> NonFiniteGradient:
    return NonFiniteGradient(
        f"round {turn.round + 1}: what client {turn.client} changed of {name!r} on rank {rank} is not finite, and does "
        "not count (lower the learning rate or clip; --option nonfinite=skip leaves such clients out)"
    )
