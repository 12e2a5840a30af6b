"""One worker's push as messages, from when it is made until it counts on all servers.

The first server may decide for others, which are told so then (`follow_up`); where servers outlive workers, some are to
have a push before it counts on any (`held`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

from torch import Tensor

from paceline.messages import HOLD, STOP, VOID, Kind, Message, to_frames
from paceline.server.asked_server import AskedServer, Request
from paceline.server.committing import Committing
from paceline.server.spec import Push

Requests = Callable[[int, AskedServer], list[Message]]
"""Makes what a server is asked, whose index is given."""
Rows = Sequence[tuple[Mapping[str, Any], Sequence[Tensor]]]
"""For each server, gradients of rows, and what there is to say of them."""


@final
class Pushing:
    """A part of `ClientCore`."""

    def __init__(self, servers: Sequence[AskedServer], *, rank: int, epoch: int) -> None:
        self._servers, self._rank, self._epoch = servers, rank, epoch
        self._committing = Committing(servers)
        self._pushed: tuple[Push, Request] | None = None
        self._clock = 0

    def attached(self, said: Sequence[Mapping[str, Any]]) -> None:
        """What each server says to a worker that attaches."""
        self._committing.attached(said)

    def moved(self, index: int) -> None:
        """Another server has this one's place, and knows nothing of the push."""
        self._committing.moved(index)

    def begin(self, push: Push, *, clock: int, rows: Rows) -> Requests:
        """What each server is to be asked."""
        flags = (VOID if push.void else 0) | (STOP if push.stop else 0) | (HOLD if self._committing.is_needed else 0)
        self._committing.begin()
        request = partial(
            Message,
            Kind.EXCHANGE,
            self._epoch,
            sender=self._rank,
            flags=flags,
            clock=clock,
            pause_at=push.pause_at,
            body=_body_of(push),
        )

        def requests(index: int, server: AskedServer) -> list[Message]:
            comes_last = self._committing.is_needed and not self._committing.holds(server)
            if comes_last or server.waits_for_decision:
                return []  # it gets the push when all others have it, or with the decision
            first, *others = [request()] if push.void else server.pushed(request)
            return [_with_rows(first, *rows[index]) if rows else first, *others]

        self._pushed, self._clock = (push, request), clock
        return requests

    def end(self) -> None:
        """The worker asks for something else."""
        self._pushed = None

    @property
    def is_under_way(self) -> bool:
        return self._pushed is not None

    def held(self, index: int) -> Iterator[tuple[int, Message]]:
        """A server has all of the push. Once every server has it that is to, says what tells them that it counts; those
        beside this worker get it only now."""
        if self._pushed is None:
            return
        for each in self._committing.held(index):
            server = self._servers[each]
            if server.waits_for_decision:
                continue
            if self._committing.holds(server):
                yield each, Message(Kind.COUNT, self._epoch, sender=self._rank, clock=self._clock)
            else:
                yield each, _whole(server, *self._pushed)

    def follow_up(self, decided: Message) -> Iterator[tuple[int, Message]]:
        """What other servers are told of the first one's decision; those beside, with the push."""
        if self._pushed is None:
            return
        decision = {"contributors": decided.body["contributors"], "goes_on_at": decided.clock}
        for index, server in enumerate(self._servers):
            if server.waits_for_decision:
                message = _whole(server, *self._pushed)
                message.body = {**message.body, **decision}
                yield index, message
            elif server.follows:
                yield index, Message(Kind.FOLLOW, self._epoch, sender=self._rank, body=decision)


def _body_of(push: Push) -> dict[str, Any]:
    """What differs from a plain push."""
    body: dict[str, Any] = {}
    if push.groups is not None:
        body["groups"] = [dict(group) for group in push.groups]
    if push.sender is not None:
        body["sender"] = push.sender
    if push.weight != 1.0:
        body["weight"] = push.weight
    if push.kind != "gradient":
        body["kind"] = push.kind
    if push.done is not None:
        body["done"] = push.done
    if push.share is not None:
        body["share"] = list(push.share)
    return body


def _whole(server: AskedServer, push: Push, request: Request) -> Message:
    """A push to a server beside, which is to count it now."""
    message = request(tensor_bytes=0 if push.void else server.pushed_bytes)
    message.flags &= ~HOLD
    return message


def _with_rows(push: Message, about: Mapping[str, Any], tensors: Sequence[Tensor]) -> Message:
    """The push, with these behind what it has of the model, which is nothing where the server is beside."""
    push.body = {**push.body, "rows": about}
    push.payload = [*push.payload, *to_frames(tensors)]
    push.tensor_bytes += sum(tensor.nbytes for tensor in tensors)
    return push
