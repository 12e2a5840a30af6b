"""Where servers outlive workers, a push counts on all of them or on none, whoever dies when.

A server on the worker's host finds the push in memory that it reaches, all of it, also when the worker is dead. To
servers elsewhere it comes in pieces, of which some may be lost with the worker, on their way to this server or that
one. So these keep pieces aside until they have all. If there are other servers, each says then that it has them
(`HELD`), and when all elsewhere have said so, the worker tells every server that the push counts: a two-phase commit
(Gray, "Notes on Data Base Operating Systems", 1978).

Whoever is told that a worker is dead asks every server what it has of it (`Parted`). From there on a server hears
nothing of that worker any more, and so nothing that is still on its way changes what these words come to
(`what_counts`): where one server has counted a push, all others can.

Servers' copies (`replication.py`) have to be able to do what their server could. On one host they reach the memory as
well. Between hosts all servers have a push first, also those that reach it, and have their copies have it, before they
say so: no push counts that is not in all copies.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from paceline.messages import ALL_SHARDS, Kind, Message, WireError


class Parted(NamedTuple):
    """What a server has of a worker that it hears nothing of any more. Pushes come without their tensors."""

    counted: Message | None
    """The last push that counts here."""
    held: Message | None
    """A later one, of which all pieces are here."""
    reaches_memory: bool
    """It can read from the worker's memory what it was not told of."""

    def can_count(self, clock: int) -> bool:
        """Whether the worker's push for this clock counts here, or can."""
        return self.reaches_memory or clock in (push.clock for push in (self.counted, self.held) if push is not None)


def what_counts(said: Sequence[Parted]) -> Message | None:
    """A worker's last push that is to count on all servers, after what each of them has of it; none if there is none.
    Where some server lacks a part of a later push, that is dropped everywhere: no server has counted it."""
    pushes = [push for parted in said for push in (parted.counted, parted.held) if push is not None]
    pushes.sort(key=lambda push: push.clock, reverse=True)
    return next((push for push in pushes if all(parted.can_count(push.clock) for parted in said)), None)


@final
class WholePushes:
    """What one server has of its workers' pushes."""

    def __init__(self) -> None:
        self._pieces: dict[int, set[int]] = {}  # by worker, whose push is on its way: shards that have theirs
        self._held: dict[int, Message] = {}
        self._counted: dict[int, Message] = {}

    def has_all(self, piece: Message, *, num_shards: int) -> bool:
        """A push has come, or a piece of one. Returns whether all of it is here now."""
        come = self._pieces.setdefault(piece.sender, set())
        come.update(range(num_shards) if piece.shard == ALL_SHARDS else (piece.shard,))
        if len(come) < num_shards:
            return False
        del self._pieces[piece.sender]
        return True

    def hold(self, push: Message) -> None:
        """All of it is here, and other servers are to have it, too, before it counts."""
        self._held[push.sender] = _without_tensors(push)

    def holds(self, worker: int) -> Message:
        """What is held of this worker's. Raises KeyError if nothing is."""
        return self._held[worker]

    def held(self, worker: int, *, clock: int) -> Message:
        """All servers have it. Raises WireError if no such push is held."""
        push = self._held.pop(worker, None)
        if push is None or push.clock != clock:
            raise WireError(f"worker {worker} says that its push for clock {clock} counts, which is not here")
        return push

    def count(self, push: Message) -> None:
        self._counted[push.sender] = _without_tensors(push)
        held = self._held.get(push.sender)
        if held is not None and held.clock <= push.clock:
            del self._held[push.sender]

    def last(self, worker: int) -> Message | None:
        """The last push of this worker's that counts."""
        return self._counted.get(worker)

    def counted(self) -> Iterable[Message]:
        """The last of each worker that counts."""
        return self._counted.values()

    def all_held(self) -> Iterable[Message]:
        return self._held.values()

    def lacks(self, push: Message) -> bool:
        """Whether the push, which is to count, does not do so yet."""
        counted = self._counted.get(push.sender)
        return counted is None or counted.clock < push.clock

    def parted(self, worker: int, *, reaches_memory: bool) -> Parted:
        return Parted(self._counted.get(worker), self._held.get(worker), reaches_memory)

    def let_go(self, worker: int) -> None:
        """It is gone, and all that counts of it does so."""
        self._pieces.pop(worker, None)
        self._held.pop(worker, None)


def to_body(push: Message) -> dict[str, Any]:
    """What says it in a message's body, without its tensors."""
    return {"worker": push.sender, "clock": push.clock, "flags": push.flags, "at": push.pause_at, "says": push.body}


def from_body(body: Mapping[str, Any]) -> Message:
    """Raises LookupError if this is nothing that `to_body` gives."""
    worker, clock, flags, pause_at, says = (body[name] for name in ("worker", "clock", "flags", "at", "says"))
    return Message(Kind.EXCHANGE, 0, sender=worker, clock=clock, flags=flags, pause_at=pause_at, body=says)


def _without_tensors(push: Message) -> Message:
    return replace(push, shard=ALL_SHARDS, tensor_bytes=0, payload=())
