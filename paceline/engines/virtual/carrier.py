"""A worker's messages to parameter servers on virtual hosts."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from paceline.cluster.worker_costs import Cost
from paceline.comm.servers.carrier import Carrier
from paceline.engines.virtual.computing.requests import RequestCosts
from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.process import Process, Signal
from paceline.engines.virtual.server import VirtualServer
from paceline.errors import Aborted
from paceline.layout import Layout
from paceline.messages import ABOUT_ROWS, Kind, Message
from paceline.server.actions import Send
from paceline.server.client_core import ClientCore
from paceline.server.conversation import Conversation
from paceline.server.spec import OptimizerSpec


@final
class VirtualCarrier(Carrier):
    """Messages only stand for their tensors: servers read and write the worker's memory, while it waits. A request
    takes the worker what `costs` say, besides what passes the network. Rows, and gradients of rows, are divided among
    servers, and put together again, at a rate."""

    carries_bytes = False

    def __init__(
        self,
        servers: Sequence[VirtualServer],
        network: Network,
        *,
        process: Process,
        host: int,
        row_bytes_per_s: float,
        costs: RequestCosts,
        number: int = 0,
    ) -> None:
        self.host, self.number = host, number
        self.beside = [server.host == host for server in servers]
        self._servers, self._network, self._process = servers, network, process
        self._costs, self._row_bytes_per_s = costs, row_bytes_per_s
        self._taken_bytes = 0  # of rows that have come, and are to be put together
        self._client: Conversation | None = None
        self._store: Conversation | None = None  # which is not about rows
        self._ahead: Conversation | None = None
        self._all_here = Signal()
        self._abort_reason: str | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def bodies(self, parameters: Tensor, gradients: Tensor) -> Sequence[Mapping[str, Any]]:
        return [{"parameters": parameters, "gradients": gradients}] * len(self._servers)

    def attached(
        self, client: ClientCore, layout: Layout, spec: OptimizerSpec, said: Sequence[Mapping[str, Any]]
    ) -> None:
        self._store = client

    def carry(self, client: Conversation, sends: Iterable[Send]) -> float:
        if self._abort_reason is not None:
            raise Aborted(f"a request to the servers was ended: {self._abort_reason}")
        began_s = self._process.catch_up()
        self._client, self._all_here = client, Signal()
        if sends := list(sends):
            self._send_off(sends)
        elif client.is_done:
            return 0.0
        self._process.wait(self._all_here, lambda: f"{client.what}, of which server(s) {client.due} owe an answer")
        taken_bytes, self._taken_bytes = self._taken_bytes, 0
        self._process.compute(taken_bytes / self._row_bytes_per_s)
        return self._process.now_s - began_s

    def set_off(self, conversation: Conversation, sends: Iterable[Send]) -> None:
        self._ahead = conversation
        self._send_off(list(sends))

    def _send_off(self, sends: Sequence[Send]) -> None:
        about_rows = [message for _, message in sends if message.kind in ABOUT_ROWS]
        cost = self._costs.next(about_rows=bool(about_rows))
        core_s = self._costs.core_s(cost, [self.beside[index] for index, _ in sends])
        self._process.compute(sum(message.tensor_bytes for message in about_rows) / self._row_bytes_per_s)
        self._process.take(Cost(cost.duration_s, core_s))
        self._process.post(self._send, sends)

    def deliver(self, server: int, message: Message) -> None:
        heard_by = self._ahead if message.kind is Kind.READ_AHEAD else self._client
        if heard_by is None or self._process.is_dead:
            return  # what was read ahead comes when the worker has ended
        if heard_by is not self._store:
            self._taken_bytes += message.tensor_bytes
        self._send(heard_by.receive(server, message))
        if heard_by is self._client and self._client.is_done and self._all_here.fired_s is None:
            self._all_here.fire(self._process.timeline)

    def abort(self, reason: str) -> None:
        self._abort_reason = reason

    def close(self) -> None:
        self._client = self._ahead = None

    def _send(self, sends: Iterable[Send]) -> None:
        for index, message in sends:
            server = self._servers[index]
            arrive = partial(server.receive, self, message)
            self._network.send(self.host, server.host, float(message.num_bytes), arrive)
