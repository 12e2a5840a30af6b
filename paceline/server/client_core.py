"""A worker's end of the protocol: which requests go to which server, and what is made of their answers.

Sans-IO, like `ServerCore`. One conversation at a time: a request to every server, until all that is due has come.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, final

from torch import Tensor

from paceline.layout import Layout
from paceline.messages import (
    ADMITTED,
    APART,
    FRAME_BYTES,
    HEAD_BYTES,
    IN_TURN,
    STOP,
    Kind,
    Message,
    WireError,
    from_frames,
)
from paceline.server.actions import Send
from paceline.server.asked_server import AskedServer
from paceline.server.coded_push import CodedPushes, PushCoding
from paceline.server.pushing import Pushing, Requests, Rows
from paceline.server.ranges import KeyRange, in_shards
from paceline.server.spec import Push, Reply
from paceline.server.state import join, pack, split, unpack
from paceline.server.whole_updates import Took
from paceline.server.windows import PIECES_UNDER_WAY, SendWindow

_SHARD = attrgetter("shard")
_TENSORS = frozenset({Kind.EXCHANGE, Kind.WAIT, Kind.PULL})  # answered with parameters


def _nothing(index: int, server: AskedServer) -> list[Message]:
    return []


@final
class ClientCore:
    """
    Args:
        epoch: of the membership.
        beside: of each server, in the order of their key ranges, whether it is on this worker's host.
        carries_bytes: messages to servers elsewhere hold tensors as frames; else they only stand for them.
        epochs: of messages to each server, where some have taken others' places; none: the membership's.
    """

    def __init__(
        self,
        *,
        rank: int,
        epoch: int,
        beside: Sequence[bool],
        carries_bytes: bool = True,
        epochs: Sequence[int] | None = None,
    ) -> None:
        self.what = ""
        """What the present conversation is about, in words."""
        self.moved_bytes = 0
        """Bytes of the present conversation's messages so far."""
        self.rank, self._epoch, self._carries_bytes = rank, epoch, carries_bytes
        kinds = zip(beside, epochs or [epoch] * len(beside), strict=True)
        self._servers = [AskedServer(carries_bytes, is_beside, own_epoch) for is_beside, own_epoch in kinds]
        self._layout: Layout | None = None
        self._bodies: list[Mapping[str, Any]] = []  # how each server reaches this worker's memory
        self._rows: Rows = ()
        self._clock = 0
        self._begun_at = 0  # the iteration at which clocks began
        self._num_due = 0
        self._pushing = Pushing(self._servers, rank=rank, epoch=epoch)
        self._rows_come_first = False  # several servers go on without this worker when it dies
        self._error: WireError | None = None
        self._requests: Requests = _nothing

    # --- conversations ------------------------------------------------------------------------------------------

    def attach(
        self,
        layout: Layout,
        ranges: Sequence[KeyRange],
        *,
        whole: bool,
        parameters: Tensor,
        gradients: Tensor,
        bodies: Sequence[Mapping[str, Any]],
        coding: PushCoding | None = None,
    ) -> list[Send]:
        """
        Args:
            whole: each server holds its range in one shard.
            parameters, gradients: this worker's buffers, laid out like the model.
            coding: of what is pushed.
            bodies: how each server reaches them.
        """
        self._layout = layout
        for index, (server, pieces) in enumerate(zip(self._servers, ranges, strict=True)):
            shards = in_shards(pieces, whole=whole)
            server.pieces = pieces
            server.parameters = [[piece.view(layout, parameters) for piece in shard] for shard in shards]
            server.gradients = [[piece.view(layout, gradients) for piece in shard] for shard in shards]
            server.shard_bytes = [sum(piece.num_bytes(layout) for piece in shard) for shard in shards]
            server.range_bytes = sum(server.shard_bytes)
            if coding is not None:
                server.coded = CodedPushes(coding, layout, shards, server.gradients, server=index, rank=self.rank)
        self._bodies = list(bodies)
        return self._ask("attach", lambda index, _: [self._attaching(index)])

    def initialise(self, *, iteration: int) -> list[Send]:
        """Give the servers this worker's parameters."""
        request = partial(self._message, Kind.INITIALISE, iteration=iteration)
        return self._ask("initial parameters", lambda _, server: server.with_tensors(request, server.parameters))

    def begin_at(self, iteration: int) -> None:
        """The servers go on there: what codecs draw follows from the iteration, not from clocks that begin anew."""
        self._begun_at = iteration

    def encode(self, push: Push) -> None:
        """Encode what is pushed next, for servers that get it through a codec."""
        for server in self._servers:
            if server.coded is None or push.void:
                continue
            if push.is_last or not server.is_coded:
                server.coded.take_along(stands_in=push.stands_in, weight=push.weight)
                continue
            step = self._begun_at + self._clock
            server.coded.encode(step=step, stands_in=push.stands_in, weight=push.weight)
            if server.is_beside or not self._carries_bytes:
                server.coded.decode_in_place(by_server=not server.is_beside)

    def settle(self, reply: Reply) -> None:
        """The last push has been answered."""
        for server, staleness in zip(self._servers, reply.staleness, strict=True):
            if server.coded is not None:
                server.coded.settle(is_applied=staleness >= 0)

    @property
    def rows_come_along(self) -> bool:
        """Whether a push may bring gradients of rows; not where all servers are to have theirs before one has the push:
        it gets that only when another one has decided, or goes on with what others have of a worker that dies."""
        return not (self.has_followers or self._rows_come_first)

    def take_along(self, rows: Rows) -> None:
        """Have the next exchange bring each server these gradients of rows, as it may."""
        self._rows = rows

    @property
    def takes_rows_along(self) -> bool:
        """Whether the next exchange brings gradients of rows."""
        return bool(self._rows)

    def exchange(self, push: Push) -> list[Send]:
        rows, self._rows = self._rows, ()
        requests = self._pushing.begin(push, clock=self._clock, rows=rows)
        return self._ask(f"exchange of clock {self._clock}", requests)

    def wait(self, *, pause_at: int) -> list[Send]:
        """Ask for admission without a contribution."""
        return self._ask_all("admission", Kind.WAIT, pause_at=pause_at)

    def pull(self) -> list[Send]:
        return self._ask_all("pull", Kind.PULL)

    def how_far(self) -> list[Send]:
        return self._ask_all("the iteration", Kind.HOW_FAR)

    def leave(self) -> list[Send]:
        return self._ask_all("leave", Kind.LEAVE)

    def step_aside(self) -> list[Send]:
        return self._ask_all("waiting for all workers", Kind.STEP_ASIDE)

    def come_back(self) -> list[Send]:
        return self._ask_all("going on with all workers", Kind.COME_BACK)

    def get_state(self) -> list[Send]:
        return self._ask_all("optimizer state", Kind.GET_STATE)

    def set_state(self, state: Mapping[str, Tensor]) -> list[Send]:
        parts = split(self._require_layout(), [server.pieces for server in self._servers], state)

        def requests(index: int, _: AskedServer) -> list[Message]:
            body, payload = pack(parts[index])
            return [self._message(Kind.SET_STATE, body=body, payload=payload, tensor_bytes=sum(map(len, payload)))]

        return self._ask("optimizer state", requests)

    def moved(self, index: int, *, epoch: int, is_beside: bool, body: Mapping[str, Any]) -> list[Send]:
        """Another server has this key range from now on. It is asked again what has not been answered.

        Args:
            body: how it reaches this worker's memory.
        """
        server = self._servers[index]
        server.epoch, server.is_beside = epoch, is_beside
        if is_beside and server.coded is not None:
            server.coded.decode_in_place()
        self._num_due += not server.is_new
        server.is_new = True
        self._pushing.moved(index)
        self._bodies[index] = body
        return [self._sent(index, self._attaching(index))]

    def ask_again(self, index: int) -> list[Send]:
        """Say what to send a server that has just taken another's place, which owed answers."""
        return self._ask_server(index) if self._servers[index].num_due else []

    def close(self) -> None:
        """Let go of all memory."""
        self._servers.clear()

    # --- answers ------------------------------------------------------------------------------------------------

    def receive(self, index: int, answer: Message) -> Iterator[Send]:
        """A server's answer has come. Say what to send for it, each message before more is done. The caller goes
        through to the end: before that the state is not whole."""
        server = self._servers[index]
        self.moved_bytes += answer.num_bytes
        if answer.kind is Kind.ERROR:
            self._error = WireError(f"{self.what} was refused by {answer.body.get('error')}")
            return
        if server.is_new:
            server.is_new = False
            self._num_due -= 1
            server.is_in_turn = bool(answer.body["is_in_turn"])
            yield from self.ask_again(index)
            return
        if answer.kind is Kind.HELD and self._pushing.is_under_way:
            for each, message in self._pushing.held(index):
                yield self._sent(each, message)
            return
        server.num_due -= 1
        self._num_due -= 1
        server.answers.append(answer)
        if answer.flags & IN_TURN:
            yield self._sent(index, self._message(Kind.RECEIVED))
        if server.window is not None:
            server.window.answered()
            for message in server.window.take():
                yield self._sent(index, message)
        if answer.payload and answer.kind is Kind.ANSWER:
            from_frames(answer.payload, server.parameters[answer.shard])
        if "contributors" in answer.body:
            for each, message in self._pushing.follow_up(answer):
                yield self._sent(each, message)

    @property
    def is_done(self) -> bool:
        """Whether all that is due has come, or a server refused."""
        return self._error is not None or not self._num_due

    @property
    def due(self) -> list[int]:
        """Servers that owe an answer."""
        return [index for index, server in enumerate(self._servers) if server.num_due or server.is_new]

    @property
    def new(self) -> list[int]:
        """Servers that have taken others' places, and have yet to say that they know this worker."""
        return [index for index, server in enumerate(self._servers) if server.is_new]

    @property
    def has_followers(self) -> bool:
        """Whether some servers wait for what another one decides."""
        return any(server.follows for server in self._servers)

    def require_done(self) -> None:
        """Raises WireError if a server refused; the message says which, and why."""
        self._requests = _nothing  # which may hold gradients of rows
        if self._error is not None:
            raise self._error

    def attached(self) -> list[Mapping[str, Any]]:
        """What each server said to a worker that attached."""
        for server in self._servers:
            said = server.answers[0].body
            server.follows, server.is_in_turn = bool(said["follows"]), bool(said["is_in_turn"])
        bodies = [server.answers[0].body for server in self._servers]
        self._pushing.attached(bodies)
        self._rows_come_first = len(bodies) > 1 and any(said["outlives_workers"] for said in bodies)
        return bodies

    def served_itself(self, *, clock: int) -> None:
        """The worker has pushed, and goes on at this clock, without any message."""
        self._clock = clock
        self.moved_bytes = sum(2 * HEAD_BYTES + each.pushed_bytes + each.range_bytes for each in self._servers)

    def reply(self) -> Reply:
        """What the servers said. Of many shards the first server's last one decides, and speaks for all."""
        heads = [max(server.answers, key=_SHARD) for server in self._servers]
        self._clock = heads[0].clock
        return Reply(
            iteration=heads[0].iteration,
            staleness=tuple(head.staleness for head in heads),
            stop=bool(heads[0].flags & STOP),
            admitted=all(answer.flags & ADMITTED for server in self._servers for answer in server.answers),
            clock=self._clock,
            took=tuple(Took(clock, tuple(workers)) for clock, workers in heads[0].body.get("took", ())),
        )

    def state(self) -> dict[str, Tensor]:
        """The servers' optimizer state, keyed by parameter."""
        parts = [unpack(server.answers[0].body, server.answers[0].payload) for server in self._servers]
        return join(self._require_layout(), [server.pieces for server in self._servers], parts)

    @property
    def is_coded(self) -> bool:
        """Whether pushes to some server go through a codec."""
        return any(server.is_coded for server in self._servers)

    @property
    def clock(self) -> int:
        """The clock that this worker's next push belongs to."""
        return self._clock

    @property
    def iteration(self) -> int:
        """The first server's iteration, as it last said."""
        return self._servers[0].answers[-1].iteration

    @property
    def waiting_s(self) -> float:
        """How long the slowest server has let this worker wait for others."""
        return max(sum(answer.waiting_s for answer in server.answers) for server in self._servers)

    def targets(self, index: int) -> tuple[KeyRange, list[Tensor]]:
        """A server's pieces, and where this worker wants its parameters."""
        server = self._servers[index]
        return server.pieces, [tensor for shard in server.parameters for tensor in shard]

    # ------------------------------------------------------------------------------------------------------------

    def _ask_all(self, what: str, kind: Kind, **fields: Any) -> list[Send]:
        self._pushing.end()
        return self._ask(what, lambda _, server: [self._message(kind, **fields)])

    def _ask(self, what: str, requests: Requests) -> list[Send]:
        """Begin a conversation with all servers."""
        self.what, self.moved_bytes, self._num_due, self._error = what, 0, 0, None
        self._requests = requests
        for server in self._servers:
            server.num_due = 0
        return [send for index in range(len(self._servers)) for send in self._ask_server(index)]

    def _ask_server(self, index: int) -> list[Send]:
        """The server is to answer: to a request for tensors, once a shard, unless it is beside.

        Of pushed pieces only a few go out before the first is answered, where updates need every worker's.
        """
        server = self._servers[index]
        messages = self._requests(index, server)
        is_cut = bool(messages) and messages[0].kind in _TENSORS and not server.is_beside
        num_due = len(server.parameters) if is_cut else 1
        self._num_due += num_due - server.num_due
        server.num_due = num_due
        server.answers = []
        server.window = None
        if is_cut and server.is_in_turn:
            server.window = SendWindow(limit_bytes=PIECES_UNDER_WAY * FRAME_BYTES)
            for message in messages:
                server.window.put(message, message.tensor_bytes)
            messages = list(server.window.take())
        return [self._sent(index, message) for message in messages]

    def _attaching(self, index: int) -> Message:
        flags = 0 if any(server.is_beside for server in self._servers) else APART
        return self._message(Kind.ATTACH, flags=flags, body=self._bodies[index])

    def _sent(self, index: int, message: Message) -> Send:
        message.epoch = self._servers[index].epoch
        self.moved_bytes += message.num_bytes
        return Send(index, message)

    def _message(self, kind: Kind, **fields: Any) -> Message:
        return Message(kind, self._epoch, sender=self.rank, **fields)

    def _require_layout(self) -> Layout:
        if self._layout is None:
            raise WireError("the servers have not been attached yet")
        return self._layout
