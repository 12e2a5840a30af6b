"""What the server's rounds are carried by: its core, on the port that clients connect to."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.client_sockets import ClientsSocket
from paceline.engines.served.masks import form_under, round_under
from paceline.layout import TensorSpec
from paceline.records import EventRecord, Reporter, UpdateRecord
from paceline.seeding import derive
from paceline.served.form import Form
from paceline.served.rules import Rules
from paceline.served.server_core import ServerCore
from paceline.strategies.elsewhere import ClientUpdate, Total
from paceline.strategies.federated.secured import Masks

_LOOK_S, _PATIENCE_S = 0.1, 10.0
_RETURN_S = 15.0
"""A client that waits for a server that was away is there within so long: it tries every 5 s at least."""
_STRANGERS_S = 300.0
"""Time from one line of the log about connections without a ticket to the next."""
_MOST_AT_ONCE = 64


@final
class ServedClients:
    """
    Args:
        socket: the server's.
        client_of: which client has a public key.
        welcome: what a client is told of the strategy.
        masks: under which clients hide their updates; none: they come as they are.
        goes_on: clients may wait for a server that was here before this one.
        say: prints a line of the server's log.
    """

    def __init__(
        self,
        socket: ClientsSocket,
        *,
        client_of: Callable[[bytes], int | None],
        welcome: Mapping[str, Any],
        rules: Rules,
        masks: Masks | None = None,
        goes_on: bool = False,
        reporter: Reporter,
        say: Callable[[str], None],
    ) -> None:
        self.coding_seed, self.outweigh = derive(rules.seed, "coding"), rules.outweigh
        self._socket, self._client_of, self._reporter, self._print = socket, client_of, reporter, say
        # What decides about rounds is drawn apart from noise, whose seed nobody is to learn.
        self._rules = replace(rules, seed=derive(rules.seed, "clients"))
        self._welcome = {**welcome, "coding_seed": self.coding_seed}
        self._masks = masks
        self._core: ServerCore | None = None
        self._current: Callable[[], Sequence[Tensor]] = lambda: []
        self._state: Form | None = None
        self._update = Form(())
        self._num_strangers, self._told_strangers_s = 0, -_STRANGERS_S
        self._round, self._began_s = 0, time.monotonic()
        self._listens_from_s, self._return_s = math.inf, _RETURN_S if goes_on else 0.0

    def describe(
        self, state: Sequence[TensorSpec], update: Sequence[TensorSpec], *, current: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._current = current
        self._state, self._update = Form(tuple(state)), form_under(self._masks, update)
        self._core = ServerCore(
            client_of=self._client_of,
            welcome=self._welcome,
            state=self._state,
            update=self._update,
            rules=self._rules,
            mask=round_under(self._masks, self._update, seed=self.coding_seed),
        )

    def collect(self, number: int, take: Callable[[ClientUpdate], None]) -> bool:
        assert self._core is not None
        assert self._state is not None
        self._core.expect(number)
        while True:
            if self._collect(self._core, self._state, number, take):
                return True
            if self._core.failure is not None:
                then = "begins again" if self._core.begins_again else "changes nothing"
                self.tell(f"round {number} {then}, since it has no sum: {self._core.failure}")
            if not self._core.begins_again:
                return False

    def _collect(self, core: ServerCore, state: Form, number: int, take: Callable[[ClientUpdate], None]) -> bool:
        self._round = number
        content = state.write(self._current())
        told_s, patience_s = -_PATIENCE_S, _PATIENCE_S
        self._pump(core)  # who has spoken while the server was at its evaluation is there
        while not core.open(number, content, time.monotonic()):
            if self._reporter.stop_requested():
                return True
            if (now_s := time.monotonic()) - told_s >= patience_s:
                told_s, patience_s = now_s, min(2 * patience_s, _STRANGERS_S)
                there = len(core.present(now_s))
                self.tell(f"round {number} waits for clients: {there} of at least {self._rules.fewest} are there")
            self._pump(core)
        while not core.is_closed(time.monotonic()):
            if self._reporter.stop_requested():
                return True
            self._pump(core)
            while core.arrivals:
                arrival = core.arrivals.popleft()
                client = arrival.client
                tensors = self._update.read(arrival.content)
                try:
                    take(ClientUpdate(client, tensors, arrival.weight, arrival.scale))
                except ValueError as error:
                    core.refuse(client, str(error))
                else:
                    self._accept(core, client)
        if core.sum is not None:
            for client in core.sum.clients:
                self._accept(core, client)
        core.close(time.monotonic())
        self._carry(core)
        return False

    def _accept(self, core: ServerCore, client: int) -> None:
        core.accept(client)
        self._reporter.emit(UpdateRecord(0, self._round + 1, client, self._round + 1, 0))

    def total(self, vectors: Mapping[int, tuple[float, Tensor]], *, round_number: int) -> Total:
        """The sum of the round that was collected last."""
        found = self._core.sum if self._core is not None else None
        if found is None:
            return Total(torch.zeros(0), 0.0, 0)
        return Total(found.vector, found.weight, len(found.clients))

    def tell(self, text: str) -> None:
        self._say(None, text)

    def farewell(self) -> None:
        """The run is over: clients that are there end their turns and fetch what it came to, for as long as a round
        may last."""
        if self._core is None or self._state is None:
            return
        core, ends_s = self._core, time.monotonic() + self._rules.deadline_s
        core.end(self._round + 1, self._state.write(self._current()))
        self.tell("the run is over, and clients that are there fetch its model")
        while (now_s := time.monotonic()) < ends_s and not self._reporter.stop_requested():
            self._pump(core)  # who has spoken while the server was at its script is there
            if now_s >= self._listens_from_s + self._return_s and not core.present(now_s):
                break
        self._carry(core)

    def _pump(self, core: ServerCore) -> None:
        """What has come, and what is to go: of either so much that nobody keeps the server from looking at the time."""
        self._listens_from_s = min(self._listens_from_s, time.monotonic())
        self._carry(core)
        for number in range(_MOST_AT_ONCE):
            came = self._socket.receive(0.0 if number else _LOOK_S)
            if came is None:
                break
            core.receive(*came, time.monotonic())
            if core.arrivals:
                break
        self._carry(core)
        self._num_strangers += self._socket.num_strangers()
        if self._num_strangers and (now_s := time.monotonic()) - self._told_strangers_s >= _STRANGERS_S:
            self._say(None, f"{self._num_strangers} connection(s) without a ticket of this server were refused")
            self._num_strangers, self._told_strangers_s = 0, now_s

    def _carry(self, core: ServerCore) -> None:
        for route, message in core.outbox:
            self._socket.send(route, message)
        core.outbox.clear()
        for said in core.log:
            self._say(said.client, said.text)
        core.log.clear()

    def _say(self, client: int | None, text: str) -> None:
        who = "server" if client is None else f"client {client}"
        self._print(f"[{who}] {text}")
        now_s = time.monotonic() - self._began_s
        self._reporter.emit(EventRecord("said", who, self._round, now_s, {"text": text}))
