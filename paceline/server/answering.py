"""How a server answers its workers: whose requests are complete, what each worker gets, and what goes in turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from paceline.messages import ADMITTED, ALL_SHARDS, IN_TURN, STOP, Kind, Message, Raw, WireError
from paceline.records import UpdateRecord
from paceline.server.actions import Action, BesideNext, Send, Updated
from paceline.server.closing import Answer
from paceline.server.part import Part
from paceline.server.tables.shards import TableShards
from paceline.server.windows import AnswerWindow


@dataclass
class Client:
    """One worker, as this server sees it."""

    gradients: list[list[Tensor]]
    """For each shard, where the worker computes its gradients if that is in reach, else where they are put as they
    arrive."""
    parameters: list[list[Tensor]] | None
    """For each shard, where the worker wants its parameters; none if that is out of reach."""
    is_beside: bool
    """It is on this host, where it asks, and is answered, once for all shards."""
    arrived_s: float = 0.0
    """When its last request did."""
    released_s: float = 0.0
    """When a shard last stopped to hold an answer back."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """For a worker beside: what shards have answered to its request so far."""


@final
class Answering:
    """A part of `ServerCore`.

    Args:
        index: which server of the group this is.
        epoch: of the membership.
        tables: are updated with the last shard.
        window: of answers that go in turn.
    """

    def __init__(self, *, index: int, epoch: int, tables: TableShards, window: AnswerWindow[Message]) -> None:
        self.index, self.epoch, self.window = index, epoch, window
        self.parts: list[Part] = []
        self.numbered_parts: list[tuple[int, Part]] = []
        self.is_timed = False
        """Whether the last shard, which decides for the others, needs to be told the time."""
        self.clients: dict[int, Client] = {}
        self.is_in_turn = False
        """Whether pieces pass links a few at a time: there are more, and each needs every worker's gradient."""
        self.range_bytes = 0
        self.some_read_for_themselves = False
        self.some_are_apart = self.has_neighbour = False
        self.tables = tables

    @property
    def iteration(self) -> int:
        return self.parts[-1].shard.iteration if self.parts else 0

    def message(self, kind: Kind, **fields: Any) -> Message:
        return Message(kind, self.epoch, sender=self.index, iteration=self.iteration, **fields)

    def set_parts(self, parts: Sequence[Part]) -> None:
        self.parts, self.numbered_parts = list(parts), list(enumerate(parts))
        self.is_timed = bool(parts) and parts[-1].shard.rule.is_timed
        self.range_bytes = sum(part.tensor_bytes for part in parts)

    def parts_of(self, message: Message) -> list[tuple[int, Part]]:
        """The shards that a message is about, with their indices. Raises WireError if there is no such shard."""
        if message.shard == ALL_SHARDS:
            return self.numbered_parts
        if not 0 <= message.shard < len(self.parts):
            raise WireError(f"server {self.index} has {len(self.parts)} shards, and none of index {message.shard}")
        return [(message.shard, self.parts[message.shard])]

    def tick(self, now_s: float) -> Iterator[Action]:
        """Do what is due by now. Only the shard that decides for others looks at the time."""
        if self.is_timed:
            part = self.parts[-1]
            yield from self.answer(len(self.parts) - 1, part, part.shard.tick(now_s), now_s)

    def answer(self, index: int, part: Part, answers: Sequence[Answer], now_s: float) -> Iterator[Action]:
        """Give every worker that is complete the current parameters of this shard, those elsewhere first.

        Args:
            now_s: when the request arrived that completed them; until then they waited for others.
        """
        is_last = index == len(self.parts) - 1
        applied = part.shard.drain_applied()
        if applied:
            told = applied if is_last else ()
            records = [UpdateRecord(self.index, one.iteration, one.worker, one.clock, one.staleness) for one in told]
            row_bytes = self.tables.update(applied) if is_last else 0
            yield Updated(part, len(applied), records, row_bytes)
        for answer in answers:
            part.shard.pulled(answer.worker)
        beside = [answer for answer in answers if self.clients[answer.worker].is_beside]
        if len(beside) < len(answers):
            for answer in answers:
                client = self.clients[answer.worker]
                if not client.is_beside:
                    payload = self.give(client, index, part)
                    message = self._about(answer, admitted=answer.admitted, waiting_s=_waited_s(client, now_s))
                    client.released_s = now_s
                    with_tensors(message, index, part, payload)
                    yield from self._send_elsewhere(answer.worker, message, now_s)
            if any(len(self.clients[answer.worker].answers) == len(self.parts) - 1 for answer in beside):
                yield BesideNext()
        for answer in beside:
            client = self.clients[answer.worker]
            self.give(client, index, part)
            client.answers[index] = answer
            if len(client.answers) == len(self.parts):
                yield Send(answer.worker, self._joint(client, now_s))
        if is_last:
            for answer in answers:
                if answer.contributors is not None:
                    yield from self.tell_followers(answer.worker, answer.clock, answer.contributors, now_s)

    def _send_elsewhere(self, worker: int, message: Message, now_s: float) -> Iterator[Action]:
        """Send it in turn where a worker beside this server has to push over a busier link than workers of some other
        hosts."""
        if self.is_in_turn and self.has_neighbour and self.some_are_apart:
            message.flags |= IN_TURN
            self.window.put(worker, message, message.tensor_bytes)
            return self.next_in_turn(now_s)
        return iter((Send(worker, message),))

    def next_in_turn(self, now_s: float) -> Iterator[Action]:
        """What may go now."""
        return (Send(worker, message) for worker, message in self.window.take(now_s))

    def _joint(self, client: Client, now_s: float) -> Message:
        """One answer for all shards, which the last speaks for."""
        answers = [client.answers.pop(index) for index in range(len(self.parts))]
        is_admitted = all(answer.admitted for answer in answers)
        message = self._about(answers[-1], admitted=is_admitted, waiting_s=_waited_s(client, now_s))
        message.tensor_bytes = self.range_bytes
        return message

    def give(self, client: Client, index: int, part: Part) -> Sequence[Raw]:
        """Have the worker get the parameters as they are now; what has to be sent for that."""
        if client.parameters is None:
            return part.as_frames()
        if not (client.is_beside and self.some_read_for_themselves):
            _copy(part.shard.parameters, client.parameters[index])
        return ()

    def _about(self, answer: Answer, *, admitted: bool, waiting_s: float) -> Message:
        return Message(
            Kind.ANSWER,
            self.epoch,
            sender=self.index,
            flags=(STOP if answer.stop else 0) | (ADMITTED if admitted else 0),
            clock=answer.clock,
            iteration=answer.iteration,
            staleness=answer.staleness,
            waiting_s=waiting_s,
            body={
                **({} if answer.contributors is None else {"contributors": answer.contributors}),
                **({"took": answer.took} if answer.took else {}),
            },
        )

    def tell_followers(self, worker: int, clock: int, contributors: Sequence[int], now_s: float) -> Iterator[Action]:
        """A worker has brought what another shard decided."""
        for index, part in enumerate(self.parts):
            if part.shard.follows:
                yield from self.answer(index, part, part.shard.follow(worker, clock, contributors), now_s)


def with_tensors(message: Message, index: int, part: Part, payload: Sequence[Raw]) -> Message:
    """The message, which brings this shard's parameters."""
    message.shard, message.payload, message.tensor_bytes = index, payload, part.tensor_bytes
    return message


def _waited_s(client: Client, released_at_s: float) -> float:
    """For how long a worker waited: with many pieces from the latest that has come so far, and no time counts twice."""
    return max(0.0, released_at_s - max(client.arrived_s, client.released_s))


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
