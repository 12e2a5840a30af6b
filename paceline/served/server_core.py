"""The server's end of a served run: who is there, whose turn it is, and what is taken of what they send."""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

from paceline.messages import FRAME_BYTES, Kind, Message, Raw, WireError, raw_bytes
from paceline.roster import num_drawn
from paceline.served.clients import Arrival, Client, Said, Turn
from paceline.served.form import EPOCH, MOST_SAMPLES, TRAINS, VERSION, Form, Refused, piece, pieces_of
from paceline.served.masking import UNMASKING, VECTORS
from paceline.served.rules import Rules

if TYPE_CHECKING:
    from paceline.served.masked_round import MaskedRound, Sum

PRESENCE_S = 30.0
"""A client that has not been heard of for so long is not there."""
_MOST_REFUSALS, _TOLD_REFUSALS, _MOST_SAID = 100, 3, 20


@final
class ServerCore:
    """Messages in, messages out.

    Args:
        client_of: the number of the client whose ticket has this public key; none: no ticket has it any more.
        welcome: what a client is told when it comes.
        state, update: of what goes to clients, and of what comes from them.
        mask: begins a round in which updates come under masks, from clients of these weights; none: they come as they
            are.
    """

    def __init__(
        self,
        *,
        client_of: Callable[[bytes], int | None],
        welcome: Mapping[str, Any],
        state: Form,
        update: Form,
        rules: Rules,
        presence_s: float = PRESENCE_S,
        mask: "Callable[[Mapping[int, float], int], MaskedRound] | None" = None,
    ) -> None:
        self._client_of, self._welcome, self._rules, self._presence_s = client_of, dict(welcome), rules, presence_s
        self._state, self._update, self._mask = state, update, mask
        self._masked: MaskedRound | None = None
        """The round, where updates come under masks."""
        self._stage_ends_s = 0.0
        self._clients: dict[int, Client] = {}
        self._turns: dict[int, Turn] = {}
        self._round, self._content, self._ends_s, self._num_needed = -1, memoryview(b""), 0.0, 0
        self._first: int | None = None
        self._is_open = self._has_ended = False
        self.begins_again = False
        """The round that was closed has no sum, and may have one with other clients."""
        self._num_said: Counter[int | None] = Counter()
        self._unknown: set[bytes] = set()
        self.outbox: list[tuple[bytes, Message]] = []
        """Routes, and what to send along them."""
        self.log: list[Said] = []
        self.arrivals: deque[Arrival] = deque()
        """Whole updates. Each is to be accepted or refused."""

    # --- rounds -----------------------------------------------------------------------------------------------

    def present(self, now_s: float) -> list[int]:
        """Clients who could take a turn."""
        return sorted(
            number
            for number, client in self._clients.items()
            if client.is_attached and client.route is not None and now_s - client.heard_s <= self._presence_s
        )

    def expect(self, number: int) -> None:
        """The next round has this number. If it is the first one here, clients forget that an update of theirs counted
        in it, or later: a server that was here before may have said so, and has not saved it."""
        if self._first is None:
            self._first = number

    def open(self, number: int, content: memoryview, now_s: float) -> bool:
        """Begin the round of this number with this state, if enough clients are there."""
        rules, present = self._rules, self.present(now_s)
        if len(present) < rules.fewest:
            return False
        sizes = [self._clients[client].samples for client in present]
        fraction = min(1.0, rules.fraction * rules.over)
        bound = int(rules.outweigh * statistics.median(sizes))
        likely = [min(size, bound) for size in sizes]
        drawn = Counter(rules.sampler.draw(number, sizes=likely, fraction=fraction, seed=rules.seed))
        self._num_needed = num_drawn(rules.fraction, len(present)) if rules.over > 1 else len(drawn)
        self._round, self._content, self._ends_s, self._is_open = number, content, now_s + rules.deadline_s, True
        self._turns, self._masked, self.begins_again = {}, None, False
        self._num_said.clear()
        if len(drawn) < rules.least:
            self._say(None, f"round {number} draws {len(drawn)} clients, who would not hide one another")
            return True
        counts = sizes if rules.weighs else [1] * len(sizes)
        largest = rules.outweigh * statistics.median([counts[place] for place in drawn]) if drawn else 0.0
        for place, times in sorted(drawn.items()):
            client = present[place]
            if counts[place] > largest:
                self._say(client, f"says that it has {sizes[place]:,} samples; it counts as {largest:,.0f}")
            self._turns[client] = Turn(times * min(float(counts[place]), largest))
        if self._mask is not None:
            weights = {client: turn.weight for client, turn in self._turns.items()}
            self._masked, self._stage_ends_s = self._mask(weights, number), now_s + self._presence_s
        for client in self._turns:
            self._send(client, self._turn(client))
        return True

    def is_closed(self, now_s: float) -> bool:
        """Whether the round waits for nobody any more."""
        if self.arrivals:
            return False
        if self._masked is not None:
            return self._has_ended_stages(self._masked, now_s)
        states = [turn.state for turn in self._turns.values()]
        if now_s >= self._ends_s or states.count("done") >= self._num_needed:
            return True
        here = set(self.present(now_s))
        return all(turn.state != "open" or client not in here for client, turn in self._turns.items())

    def _has_ended_stages(self, masked: "MaskedRound", now_s: float) -> bool:
        """Each stage waits for those who are there, and no longer than it takes to find out that one is gone. The stage
        in which clients train waits as rounds do."""
        here = set(self.present(now_s))
        while not masked.is_over:
            waits = any(
                client in here and self._turns[client].state in ("open", "arrived") for client in masked.awaited
            )
            if masked.stage == VECTORS:
                num_arrived = sum(turn.state == "arrived" for turn in self._turns.values())
                is_enough = num_arrived >= self._num_needed and masked.is_enough
                waits = waits and not is_enough and now_s < self._ends_s
            else:
                waits = waits and now_s < self._stage_ends_s
            if waits:
                return False
            for client, message in masked.end_stage().items():
                self._send(client, message)
            self._stage_ends_s = now_s + self._presence_s
        return True

    @property
    def sum(self) -> "Sum | None":
        """The sum of the round's updates, once it is closed, where they came under masks; none: there is none."""
        return self._masked.sum if self._masked is not None else None

    @property
    def failure(self) -> str | None:
        """Why there is no sum of updates that came under masks."""
        return self._masked.failure if self._masked is not None else None

    def close(self, now_s: float) -> None:
        """End the round. Who has not answered is left out of it."""
        is_enough = sum(turn.state == "done" for turn in self._turns.values()) >= self._num_needed
        here = set(self.present(now_s))
        for client, turn in self._turns.items():
            if turn.state == "open":
                why = "was not needed any more in" if is_enough else "did not end its turn of"
                where = "" if client in here else ": it is not there any more"
                self._say(client, f"{why} round {self._round}{where}")
        if (masked := self._masked) is not None:
            may_differ = masked.stage == UNMASKING or any(
                turn.state in ("open", "gone") for turn in self._turns.values()
            )
            self.begins_again = masked.failure is not None and may_differ
        self._is_open = False
        self._turns = {}

    def accept(self, client: int) -> None:
        """What arrived from the client counts."""
        self._turns[client].state = "done"
        self._clients[client].counted = self._round
        self._send(client, self._received(client, self._round))

    def refuse(self, client: int, reason: str) -> None:
        """What arrived from the client does not count, and it has no second try."""
        self._turns[client].state = "refused"
        self._say(client, f"its update of round {self._round} is refused: {reason}")
        self._send(client, _error(reason, number=self._round))

    def end(self, number: int, content: memoryview) -> None:
        """The run is over; clients may have its state."""
        self._round, self._content, self._is_open, self._has_ended = number, content, False, True
        for client, known in self._clients.items():
            if known.is_attached:
                self._send(client, self._stop(client))

    # --- messages ---------------------------------------------------------------------------------------------

    def receive(self, route: bytes, key: bytes, frames: list[Raw], now_s: float) -> None:
        """A message has come along this route from a process that has this key."""
        number = self._client_of(key)
        if number is None:
            if key not in self._unknown:
                self._unknown.add(key)
                self._say(None, f"a message under the key {key.decode()} is refused: its ticket was revoked")
            self.outbox.append((route, _error("this ticket was revoked", fatal=True)))
            return
        client = self._clients.setdefault(number, Client())
        if client.num_refused >= _MOST_REFUSALS:
            return
        try:
            self._take(number, client, route, _read(frames), now_s)
        except (WireError, Refused) as error:
            client.num_refused += 1
            if client.num_refused <= _TOLD_REFUSALS:
                self._say(number, f"a message is refused: {error}")
            if client.num_refused == _MOST_REFUSALS:
                self._say(number, f"{_MOST_REFUSALS} messages were refused; nothing of its is taken from here on")

    def _take(self, number: int, client: Client, route: bytes, message: Message, now_s: float) -> None:
        if route in client.displaced:
            self.outbox.append((route, _error("another process has joined with the same ticket", fatal=True)))
            return
        if message.kind is Kind.JOIN:
            self._join(number, client, route, message)
        elif route != client.route or not (client.is_attached or message.kind is Kind.ATTACH):
            self.outbox.append((route, Message(Kind.JOIN, EPOCH)))  # it may know a server that was here before this one
            return
        elif message.kind is Kind.ATTACH:
            self._attach(number, client, message)
        elif message.kind is Kind.LEAVE:
            client.route, client.is_attached = None, False
            self._say(number, "left")
        elif message.kind is Kind.PULSE:
            self._answer_pulse(number, message)
        elif message.kind is Kind.PULL:
            self._send_piece(number, message)
        elif message.kind is Kind.UPDATE:
            self._take_piece(number, message)
        elif message.kind is Kind.SECRETS:
            if self._masked is not None and number in self._turns:
                self._masked.receive(number, message)
        else:
            raise Refused(f"{message.kind.name} is nothing that a client says")
        client.heard_s = now_s

    def _join(self, number: int, client: Client, route: bytes, message: Message) -> None:
        if message.body.get("version") != VERSION:
            raise Refused(f"it speaks version {str(message.body.get('version'))[:20]} of the protocol, not {VERSION}")
        if client.route not in (None, route):
            assert client.route is not None
            client.displaced.append(client.route)
            self._say(number, "another process has joined with its ticket, and takes its place")
            self._send(number, _error("another process has joined with the same ticket", fatal=True))
        is_another = client.route != route
        client.is_attached = client.is_attached and not is_another
        client.route = route
        turn = self._turns.get(number)
        if turn is not None and turn.state == "open":
            turn.content = bytearray()
        if turn is not None and self._masked is not None and is_another:
            self._masked.lose(number)
            turn.state = "gone" if turn.state == "open" else turn.state
        self._send(number, Message(Kind.OK, EPOCH, body={**self._welcome, "client": number, "first": self._first}))

    def _attach(self, number: int, client: Client, message: Message) -> None:
        samples = message.body.get("samples")
        try:
            if type(samples) is not int or not 0 < samples <= MOST_SAMPLES:
                raise Refused(f"it says that it has {str(samples)[:40]} samples, which nobody has")
            self._state.require(message.body.get("state"))
            self._update.require(message.body.get("update"))
        except Refused as error:
            self._say(number, f"is refused: {error}")
            self._send(number, _error(f"{error}", fatal=True))
            return
        if not client.is_attached:
            self._say(number, f"is there, with {samples:,} samples")
        client.samples, client.is_attached = samples, True
        self._send(number, Message(Kind.ANSWER, EPOCH))
        if self._has_ended:
            self._send(number, self._stop(number))
        elif number in self._turns and self._turns[number].state == "open":
            self._send(number, self._turn(number))

    def _answer_pulse(self, number: int, message: Message) -> None:
        turn = self._turns.get(number)
        if self._has_ended:
            self._send(number, self._stop(number))
        elif turn is not None and turn.state == "open":
            is_at_it = message.flags & TRAINS and message.iteration == self._round
            is_awaited = self._masked is not None and self._masked.stage != VECTORS and number in self._masked.awaited
            self._send(number, Message(Kind.PULSE, EPOCH) if is_at_it and not is_awaited else self._turn(number))
            self._answer_again(number)
        elif turn is not None and message.iteration == self._round and turn.state == "done":
            self._send(number, self._received(number, self._round))
        else:
            self._send(number, Message(Kind.PULSE, EPOCH, iteration=self._round))
            self._answer_again(number)

    def _answer_again(self, number: int) -> None:
        if self._masked is not None and number in self._turns:
            for message in self._masked.answer_again(number):
                self._send(number, message)

    def _send_piece(self, number: int, message: Message) -> None:
        if not (self._has_ended or (self._is_open and number in self._turns)) or message.iteration != self._round:
            return  # the round has closed meanwhile
        if not 0 <= message.shard < self._state.num_pieces:
            raise Refused(f"it asks for piece {message.shard} of {self._state.num_pieces}")
        payload = [piece(self._content, message.shard)]
        self._send(number, Message(Kind.CONTENT, EPOCH, shard=message.shard, iteration=self._round, payload=payload))

    def _take_piece(self, number: int, message: Message) -> None:
        index, turn = message.shard, self._turns.get(number)
        is_due = turn is not None and message.iteration == self._round and self._is_open
        if turn is None or not is_due or not self._is_of_the_attempt(number, turn, message):
            if index == 0:
                self._say(number, f"its update of round {message.iteration} comes too late, and is dropped")
            self._send(number, self._received(number, message.iteration))
            return
        if turn.state != "open":
            self._send(number, self._received(number, self._round))
            return
        if message.body.get("nothing") is True:
            turn.state = "nothing"
            self._say(number, f"has nothing for round {self._round}")
            self._send(number, self._received(number, self._round))
            return
        try:
            self._add_piece(number, turn, message)
        except Refused as error:
            turn.state, turn.content = "refused", bytearray()
            self._send(number, _error(str(error), number=self._round))
            raise

    def _is_of_the_attempt(self, number: int, turn: Turn, message: Message) -> bool:
        """Whether an update under masks is of those that are in use, as its first piece says, and does not come after
        its stage."""
        masked = self._masked
        if masked is None or turn.state != "open":
            return True
        is_nothing = message.body.get("nothing") is True
        if (is_nothing or message.shard == 0) and not masked.is_of_it(message.body.get("attempt")):
            return False
        return is_nothing or masked.takes(number)

    def _add_piece(self, number: int, turn: Turn, message: Message) -> None:
        index, total = message.shard, self._update.num_bytes
        if message.tensor_bytes != total:
            raise Refused(f"it announces an update of {message.tensor_bytes:,} bytes, not of {total:,}")
        if index == 0:
            turn.content, turn.scale = bytearray(), _scale_in(message.body)
        raw = raw_bytes(message.payload[0]) if message.payload else memoryview(b"")
        if index * FRAME_BYTES > len(turn.content):
            return  # some were lost with a connection; the client sends all again
        if index * FRAME_BYTES < len(turn.content) or len(raw) != min(FRAME_BYTES, total - index * FRAME_BYTES):
            raise Refused(f"piece {index} of its update has {len(raw):,} bytes, or comes twice")
        turn.content += raw
        if index + 1 == pieces_of(total):
            turn.state = "arrived"
            if self._masked is not None:
                self._masked.take_vector(number, turn.content)
            else:
                self.arrivals.append(Arrival(number, turn.content, turn.weight, turn.scale))
            turn.content = bytearray()

    # --- what is said -----------------------------------------------------------------------------------------

    def _turn(self, number: int) -> Message:
        body = self._counted(number)
        if self._masked is not None:
            body["masks"] = self._masked.told(number)
        return Message(Kind.TURN, EPOCH, iteration=self._round, tensor_bytes=self._state.num_bytes, body=body)

    def _stop(self, number: int) -> Message:
        body = self._counted(number)
        return Message(Kind.STOP, EPOCH, iteration=self._round, tensor_bytes=self._state.num_bytes, body=body)

    def _received(self, number: int, round_number: int) -> Message:
        return Message(Kind.RECEIVED, EPOCH, iteration=round_number, body=self._counted(number))

    def _counted(self, number: int) -> dict[str, Any]:
        """A client keeps what goes with its update once that has counted."""
        return {"counted": self._clients[number].counted}

    def _send(self, number: int, message: Message) -> None:
        route = self._clients[number].route
        if route is not None:
            self.outbox.append((route, message))

    def _say(self, client: int | None, text: str) -> None:
        """Log a few lines a round for each client: whoever has a ticket could fill the disk otherwise."""
        self._num_said[client] += 1
        if self._num_said[client] > _MOST_SAID:
            return
        more = "; what else it does in this round is not told" if self._num_said[client] == _MOST_SAID else ""
        self.log.append(Said(client, "".join(each if each.isprintable() else "?" for each in text) + more))


def _read(frames: list[Raw]) -> Message:
    if not 2 <= len(frames) <= 3:
        raise WireError(f"a message of {len(frames)} frames is none of a client's")
    return Message.decode(frames, epoch=EPOCH)


def _scale_in(body: Mapping[str, Any]) -> float:
    scale = body.get("scale", 1.0)
    if not isinstance(scale, int | float) or not 0 < scale < 1e9:
        raise Refused(f"its number of steps is {str(scale)[:40]}")
    return float(scale)


def _error(reason: str, *, fatal: bool = False, number: int = -1) -> Message:
    return Message(Kind.ERROR, EPOCH, iteration=number, body={"reason": reason, "fatal": fatal})
