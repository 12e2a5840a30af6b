"""The client's end of a served run: it comes, waits for its turn, gets the state, and sends what it made of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from paceline.messages import FRAME_BYTES, Kind, Message, raw_bytes
from paceline.served.form import EPOCH, TRAINS, VERSION, Form, piece, pieces_of

if TYPE_CHECKING:
    from paceline.served.masked_turn import MaskedTurn

_WINDOW = 4
"""Pieces that are asked for before the first of them has come."""
_PULSE_S, _RETRY_S = 1.0, 5.0


class Phase(Enum):
    """What the client waits for."""

    JOINING = "the server's welcome"
    WELCOMED = "its own script"
    ATTACHING = "the server's word that the models are the same"
    WAITING = "its turn"
    FETCHING = "the server's state"
    SHARING = "the secrets of all who take part"
    TRAINING = "its own training"
    SENDING = "the server's word that the update has come"
    OVER = "nothing"


@dataclass(frozen=True)
class _Attached:
    state: Form
    update: Form
    samples: int
    mask: "Callable[[Mapping[str, Any], int], MaskedTurn] | None"


@final
class ClientCore:
    """Messages in, messages out. What the server may ask for is a state, and an update for it: nothing else of the
    client ever leaves."""

    def __init__(self) -> None:
        self.phase = Phase.JOINING
        self.outbox: list[Message] = []
        self.welcome: Mapping[str, Any] = {}
        self.failure: str | None = None
        """Why the server wants nothing of this client any more."""
        self.log: list[str] = []
        self.round = -1
        """The round of the turn that is under way, or was last."""
        self.counted = -1
        """The last round in which an update of this client's counted, as far as the server has said."""
        self.state = bytearray()
        """The server's, as far as it has come."""
        self.heard_s: float | None = None
        self._is_last = False  # what is fetched is the end's
        self._attached: _Attached | None = None
        self._num_asked = 0
        self._update: tuple[memoryview, dict[str, Any]] | None = None
        self._masked: MaskedTurn | None = None
        """The turn, where updates go under masks."""
        self._attempt: dict[str, Any] = {}
        """Which attempt at the round it is; the server is told with an update under masks."""
        self._spoke_s = self._moved_s = -_RETRY_S

    # --- what the script does ---------------------------------------------------------------------------------

    def attach(
        self,
        state: Form,
        update: Form,
        *,
        samples: int,
        mask: "Callable[[Mapping[str, Any], int], MaskedTurn] | None" = None,
    ) -> None:
        """The script is ready: this is what it exchanges, and how many samples it has.

        Args:
            mask: begins a turn under masks, from what the server has said of it and the round's number; none: updates
                go as they are.
        """
        self._attached = _Attached(state, update, samples, mask)
        self._say_attach()

    def send(self, content: memoryview, *, scale: float) -> None:
        """What the turn came to."""
        self._update = (content, {"scale": scale})
        self._send_update()

    def send_masked(self, vector: Tensor) -> None:
        """What the turn came to, 1-D, under this turn's masks. Nothing, if it was given up meanwhile."""
        if self.phase is not Phase.TRAINING:
            return
        assert self._masked is not None
        try:
            content = self._masked.mask(vector)
        except ValueError as error:
            self._give_up(error)
            return
        self._update = (content, self._attempt)
        self._send_update()

    def send_nothing(self) -> None:
        """The turn came to nothing."""
        self._update = (memoryview(b""), {**self._attempt, "nothing": True})
        self._send_update()

    def leave(self) -> None:
        self._out(Message(Kind.LEAVE, EPOCH))
        self.phase = Phase.OVER

    # --- time and messages ------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Say again what was not answered, so that nothing hangs on one message."""
        if self.heard_s is None:
            self.heard_s = now_s
        if self.outbox:
            self._spoke_s = now_s
            return
        if now_s - self._spoke_s < _PULSE_S:
            return
        self._spoke_s = now_s
        if self.phase is Phase.JOINING:
            self._out(Message(Kind.JOIN, EPOCH, body={"version": VERSION}))
        elif self.phase is Phase.ATTACHING:
            self._say_attach()
        elif self.phase in (Phase.WAITING, Phase.SHARING, Phase.TRAINING, Phase.SENDING):
            flags = TRAINS if self.phase is Phase.TRAINING else 0
            self._out(Message(Kind.PULSE, EPOCH, flags=flags, iteration=self.round))
        elif self.phase is Phase.FETCHING:
            if now_s - self._moved_s > _RETRY_S:
                self._moved_s = now_s
                self._num_asked = len(self.state) // FRAME_BYTES
                self._ask()
            self._out(Message(Kind.PULSE, EPOCH, flags=TRAINS, iteration=self.round))

    def receive(self, message: Message, now_s: float) -> None:
        """A message of the server's. What does not fit the phase is of an earlier one, and nothing comes of it."""
        self.heard_s = now_s
        kind, phase = message.kind, self.phase
        if type(counted := message.body.get("counted")) is int:
            self.counted = max(self.counted, counted)
        if kind is Kind.TURN:  # also of a round that begins again, after a server was killed
            self.counted = min(self.counted, message.iteration - 1)
        if kind is Kind.ERROR:
            self._take_error(message)
        elif kind is Kind.JOIN and phase is not Phase.JOINING:
            self._out(Message(Kind.JOIN, EPOCH, body={"version": VERSION}))
        elif kind is Kind.OK and phase is Phase.JOINING:
            self.welcome, self.phase = message.body, Phase.WELCOMED
        elif kind is Kind.OK and self._attached is not None:  # the server is another process than before
            if message.body.get("coding_seed") != self.welcome.get("coding_seed"):
                self.failure = "it serves another run by now; join again"
                return
            if type(first := message.body.get("first")) is int:
                self.counted = min(self.counted, first - 1)
            self._say_attach()
        elif kind is Kind.ANSWER and phase is Phase.ATTACHING:
            self.phase = Phase.WAITING
        elif kind in (Kind.TURN, Kind.STOP):
            self._take_turn(message, now_s)
        elif kind is Kind.SECRETS:
            self._take_secrets(message)
        elif kind is Kind.CONTENT and phase is Phase.FETCHING and message.iteration == self.round:
            self._take_piece(message, now_s)
        elif kind is Kind.RECEIVED and phase is Phase.SENDING and message.iteration == self.round:
            self._update, self.phase = None, Phase.WAITING

    def _take_error(self, message: Message) -> None:
        reason = str(message.body.get("reason", ""))[:500]
        if message.body.get("fatal"):
            self.failure = reason
        elif self.phase is Phase.SENDING and message.iteration == self.round:
            self.log.append(f"the server refuses the update of round {self.round}: {reason}")
            self._update, self.phase = None, Phase.WAITING

    def _take_turn(self, message: Message, now_s: float) -> None:
        """The turn of a round, or the end's state."""
        is_last, is_new = message.kind is Kind.STOP, message.iteration != self.round
        if not is_last and not is_new and self._is_of_another_attempt(message):
            is_new = True
        if self.phase is Phase.SENDING and not is_new and not is_last:
            self._send_update()
        elif self.phase in (Phase.FETCHING, Phase.SHARING) and not is_new and is_last == self._is_last:
            if self._masked is not None and not self._masked.is_answered:
                self._out(self._masked.keys())
        elif self.phase is Phase.WAITING and not is_new and not is_last and self._masked is not None:
            pass  # this turn is over, and its secrets are not to be made twice
        elif self.phase in (Phase.WAITING, Phase.FETCHING, Phase.SHARING, Phase.SENDING):
            if self.phase is Phase.SENDING:
                self.log.append(f"the server went on without the update of round {self.round}")
            self._update, self.phase, self._is_last = None, Phase.FETCHING, is_last
            self.round, self.state, self._num_asked, self._moved_s = message.iteration, bytearray(), 0, now_s
            self._masked = None
            if not is_last and not self._begin_masking(message):
                return
            self._ask()

    def _is_of_another_attempt(self, message: Message) -> bool:
        """Whether the message is of another attempt at the same round, with other secrets."""
        masks = message.body.get("masks")
        return isinstance(masks, dict) and {"attempt": masks.get("attempt")} != self._attempt

    def _begin_masking(self, message: Message) -> bool:
        """Whether the turn begins."""
        assert self._attached is not None
        if self._attached.mask is None:
            return True
        masks = message.body.get("masks")
        told = masks if isinstance(masks, dict) else {}
        self._attempt = {"attempt": told.get("attempt")}
        try:
            self._masked = self._attached.mask(told, message.iteration)
        except ValueError as error:
            self._give_up(error)
            return False
        self._out(self._masked.keys())
        return True

    def _take_secrets(self, message: Message) -> None:
        if self._masked is None or message.iteration != self.round:
            return
        try:
            answer = self._masked.answer(message)
        except ValueError as error:
            self._give_up(error)
            return
        if answer is not None:
            self._out(answer)
        if self.phase is Phase.SHARING and self._masked.may_mask:
            self.phase = Phase.TRAINING

    def _give_up(self, error: Exception) -> None:
        """The turn is not to go on: nothing of this client's is to be told apart."""
        self.log.append(f"this client takes no part in round {self.round}: {error}")
        self._masked = None
        if self.phase in (Phase.FETCHING, Phase.SHARING, Phase.TRAINING):
            self.send_nothing()

    def _take_piece(self, message: Message, now_s: float) -> None:
        assert self._attached is not None
        total = self._attached.state.num_bytes
        raw = raw_bytes(message.payload[0]) if message.payload else memoryview(b"")
        if message.shard * FRAME_BYTES != len(self.state) or len(raw) != min(FRAME_BYTES, total - len(self.state)):
            return
        self.state += raw
        self._moved_s = now_s
        if len(self.state) == total:
            is_to_share = self._masked is not None and not self._masked.may_mask
            self.phase = Phase.OVER if self._is_last else Phase.SHARING if is_to_share else Phase.TRAINING
            if self._is_last:
                self._out(Message(Kind.LEAVE, EPOCH))
        else:
            self._ask()

    # --- what goes out ----------------------------------------------------------------------------------------

    def _say_attach(self) -> None:
        assert self._attached is not None
        known = self._attached
        body = {"samples": known.samples, "state": known.state.described(), "update": known.update.described()}
        self._out(Message(Kind.ATTACH, EPOCH, body=body))
        if self.phase is Phase.WELCOMED:
            self.phase = Phase.ATTACHING

    def _ask(self) -> None:
        """Ask for the next pieces, a few at a time."""
        assert self._attached is not None
        wanted = min(self._attached.state.num_pieces, len(self.state) // FRAME_BYTES + _WINDOW)
        for index in range(self._num_asked, wanted):
            self._out(Message(Kind.PULL, EPOCH, shard=index, iteration=self.round))
        self._num_asked = max(self._num_asked, wanted)

    def _send_update(self) -> None:
        assert self._update is not None
        content, body = self._update
        self.phase = Phase.SENDING
        for index in range(pieces_of(len(content))):
            self._out(
                Message(
                    Kind.UPDATE,
                    EPOCH,
                    shard=index,
                    iteration=self.round,
                    tensor_bytes=len(content),
                    body=body if index == 0 else {},
                    payload=[piece(content, index)] if len(content) else (),
                )
            )

    def _out(self, message: Message) -> None:
        self.outbox.append(message)
