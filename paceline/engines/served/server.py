"""What a client's turns are carried by: its core, on a connection to its server."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.client_sockets import ServerSocket
from paceline.engines.served.masks import form_under, turn_under
from paceline.errors import DeadlineExceeded, UsageError
from paceline.layout import TensorSpec
from paceline.messages import Message, WireError
from paceline.served.client_core import ClientCore, Phase
from paceline.served.form import EPOCH, Form
from paceline.strategies.federated.secured import Masks

_LOOK_S, _PATIENCE_S, _PULSE_S = 0.1, 10.0, 1.0


@final
class ServerAfar:
    """
    Args:
        socket: the client's.
        where: of the server, for messages.
        deadline_s: how long the server may say nothing before the client ends.
        say: prints a line.
    """

    def __init__(self, socket: ServerSocket, *, where: str, deadline_s: float, say: Callable[[str], None]) -> None:
        self.client, self.coding_seed = -1, 0
        self.masks: Masks | None = None
        """Under which updates go."""
        self._socket, self._where, self._deadline_s, self._print = socket, where, deadline_s, say
        self._core = ClientCore()
        self._state, self._update = Form(()), Form(())
        self._told_s = self._pulsed_s = time.monotonic()

    @property
    def round(self) -> int:
        return self._core.round

    @property
    def counted(self) -> int:
        return self._core.counted

    def join(self) -> Mapping[str, Any]:
        """Wait for the server's welcome; returns it. Raises UsageError if the ticket is refused, and DeadlineExceeded
        if nobody answers."""
        while self._core.phase is Phase.JOINING:
            self._pump()
        welcome = self._core.welcome
        self.client, self.coding_seed = int(welcome["client"]), int(welcome["coding_seed"])
        return welcome

    def attach(self, state: Sequence[TensorSpec], update: Sequence[TensorSpec], *, samples: int) -> None:
        self._state, self._update = Form(tuple(state)), form_under(self.masks, update)
        mask = turn_under(self.masks, self._update, client=self.client, seed=self.coding_seed)
        self._core.attach(self._state, self._update, samples=samples, mask=mask)

    def next_turn(self, state: Sequence[Tensor]) -> bool:
        core = self._core
        if core.phase is Phase.TRAINING:
            core.send_nothing()
        while core.phase not in (Phase.TRAINING, Phase.OVER):
            self._pump()
        if self._state.num_bytes == len(core.state):
            for tensor, sent in zip(state, self._state.read(core.state), strict=True):
                tensor.copy_(sent)
        self._carry()
        return core.phase is Phase.OVER

    def send(self, update: Sequence[Tensor], *, scale: float) -> None:
        if self.masks is not None:
            self._core.send_masked(torch.cat([tensor.detach().reshape(-1).double().cpu() for tensor in update]))
        else:
            self._core.send(self._update.write(update), scale=scale)
        self._carry()

    def pulse(self) -> None:
        if (now_s := time.monotonic()) - self._pulsed_s >= _PULSE_S:
            self._pulsed_s = now_s
            self._pump(timeout_s=0.0)

    def leave(self) -> None:
        if self._core.phase is not Phase.OVER and self._core.failure is None:
            self._core.leave()
            self._carry()

    def _pump(self, timeout_s: float = _LOOK_S) -> None:
        self._core.tick(time.monotonic())
        self._carry()
        while (frames := self._socket.receive(timeout_s)) is not None:
            try:
                self._core.receive(Message.decode(frames, epoch=EPOCH), time.monotonic())
            except WireError as error:
                raise UsageError(f"{self._where} is no server of this version of Paceline: {error}") from None
            timeout_s = 0.0
        self._carry()
        self._look()

    def _carry(self) -> None:
        for message in self._core.outbox:
            self._socket.send(message)
        self._core.outbox.clear()
        for text in self._core.log:
            self._print(text)
        self._core.log.clear()

    def _look(self) -> None:
        """Raises what `join` and `next_turn` say."""
        if self._core.failure is not None:
            raise UsageError(f"the server at {self._where} refuses this client: {self._core.failure}")
        if self._socket.is_refused():
            raise UsageError(f"the server at {self._where} refuses this ticket: it was revoked, or is another server's")
        now_s = time.monotonic()
        silent_s = now_s - (self._core.heard_s or now_s)
        if silent_s > self._deadline_s:
            raise DeadlineExceeded(
                f"{self._where} has said nothing for {silent_s:.0f} s, and {self._core.phase.value} is awaited; see "
                "whether the server runs there, and whether the ticket is of this server"
            )
        if self._core.phase is not Phase.TRAINING and silent_s > _PATIENCE_S and now_s - self._told_s > _PATIENCE_S:
            self._told_s = now_s
            self._print(f"no word from {self._where} for {silent_s:.0f} s; still trying")
