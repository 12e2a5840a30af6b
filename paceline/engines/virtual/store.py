"""A worker's end of parameter servers on virtual hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from paceline.comm.base import Collective, OptimizerSpec, Push, Reply, Store, Timing
from paceline.comm.servers.send_window import PIECES_UNDER_WAY, SendWindow
from paceline.comm.wire import FRAME_BYTES, WireError
from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.process import Process, Signal
from paceline.engines.virtual.server import NOTICE_BYTES, Delivery, VirtualServer
from paceline.errors import Aborted
from paceline.layout import Layout
from paceline.server.admission import AdmissionRule
from paceline.server.ranges import KeyRange, cut, in_shards
from paceline.server.state import join, split

_Request = tuple[VirtualServer, float, Callable[[], object]]
"""Whom to ask, the bytes that go there, and what happens when they have arrived."""


@final
class VirtualStore(Store):
    """Asks all servers at the same time, piece by piece, as `ServerGroup` does.

    Args:
        servers: in the order of their key ranges.
        collective: of the workers.
        process: this worker's.
        host: this worker's.
        is_local: all workers and servers are on one host, where nothing is gained by cutting ranges into pieces.
        new_rule: makes an admission rule for a server.
        max_updates: gradients beyond this many are dropped.
        request_s: what the worker is at asking, besides what passes the network.
    """

    def __init__(
        self,
        servers: Sequence[VirtualServer],
        network: Network,
        *,
        collective: Collective,
        process: Process,
        host: int,
        is_local: bool,
        new_rule: Callable[[], AdmissionRule],
        max_updates: int | None,
        request_s: float = 0.0,
    ) -> None:
        self.timing = Timing()
        self.host = host
        self._request_s = request_s
        self._servers, self._network = list(servers), network
        self._collective, self._process = collective, process
        self._is_local, self._new_rule, self._max_updates = is_local, new_rule, max_updates
        self._layout: Layout | None = None
        self._ranges: list[KeyRange] = []
        self._gradients: list[list[list[Tensor]]] = []
        self._parameters: list[list[list[Tensor]]] = []
        self._clock = 0
        self._num_due = 0
        self._asked_s = 0.0
        self._windows: list[SendWindow[_Request]] = []  # what each server has yet to be asked
        self._deliveries: list[Delivery] = []
        self._all_here = Signal()
        self._on_delivery: Callable[[Delivery], None] = lambda delivery: None
        self._abort_reason: str | None = None

    # --- what servers see of this worker ------------------------------------------------------------------------

    @property
    def is_apart(self) -> bool:
        return all(server.host != self.host for server in self._servers)

    def gradients(self, server: int, shard: int) -> Sequence[Tensor]:
        return self._gradients[server][shard]

    def parameters(self, server: int, shard: int) -> Sequence[Tensor]:
        return self._parameters[server][shard]

    def deliver(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        if delivery.is_in_turn:
            server = self._servers[delivery.server]
            self._network.send(self.host, server.host, NOTICE_BYTES, server.received, self._collective.rank)
        self._on_delivery(delivery)
        if delivery.error is None:
            self._windows[delivery.server].answered()
            self._send_next(delivery.server)
        self._num_due -= 1
        if self._num_due == 0 or (delivery.error is not None and self._all_here.fired_s is None):
            self._all_here.fire(self._process.timeline)

    # --- what the strategy asks for -----------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def attach(self, layout: Layout, spec: OptimizerSpec, parameters: Tensor, gradients: Tensor) -> None:
        self._layout = layout
        is_whole = not spec.element_wise
        piece_bytes = None if self._is_local else FRAME_BYTES
        self._ranges = cut(layout, num_servers=len(self._servers), whole_tensors=is_whole, piece_bytes=piece_bytes)
        if self._collective.rank == 0:
            for server, pieces in zip(self._servers, self._ranges, strict=True):
                server.configure(layout, pieces, spec, self._new_rule(), self._max_updates)
        for pieces in self._ranges:
            shards = in_shards(pieces, whole=is_whole)
            self._parameters.append([[piece.view(layout, parameters) for piece in shard] for shard in shards])
            self._gradients.append([[piece.view(layout, gradients) for piece in shard] for shard in shards])
        for server in self._servers:
            server.clients[self._collective.rank] = self
        self._collective.barrier()
        self._initialise(iteration=0)

    def exchange(self, push: Push) -> Reply:
        rank, clock = self._collective.rank, self._clock
        groups = None if push.groups is None else [dict(group) for group in push.groups]

        def request(server: VirtualServer, shard: int) -> _Request:
            num_bytes = NOTICE_BYTES if push.void else server.part_bytes(shard)
            return (
                server,
                num_bytes,
                lambda: server.push(
                    rank, shard, clock, is_void=push.void, pause_at=push.pause_at, stop=push.stop, groups=groups
                ),
            )

        def tell_others(delivery: Delivery) -> None:
            """What the first server decided, as soon as it is here."""
            answer = delivery.answer
            if answer is None or answer.contributors is None:
                return
            for server in self._servers:
                if server.follows:
                    self._network.send(
                        self.host, server.host, NOTICE_BYTES, server.follow, rank, answer.clock, answer.contributors
                    )

        return self._receive(f"exchange of clock {clock}", self._of_each_shard(request), tell_others, is_push=True)

    def wait_for_admission(self, *, pause_at: int) -> Reply:
        rank = self._collective.rank

        def request(server: VirtualServer, shard: int) -> _Request:
            return server, NOTICE_BYTES, lambda: server.wait(rank, shard, pause_at)

        return self._receive("admission", self._of_each_shard(request))

    def pull(self) -> int:
        rank = self._collective.rank

        def request(server: VirtualServer, shard: int) -> _Request:
            return server, NOTICE_BYTES, lambda: server.pull(rank, shard)

        return self._head(self._ask("pull", self._of_each_shard(request)), 0).iteration

    def leave(self) -> None:
        rank = self._collective.rank
        self._ask("leave", [(server, NOTICE_BYTES, partial(server.leave, rank)) for server in self._servers])

    def optimizer_state(self) -> dict[str, Tensor]:
        rank = self._collective.rank
        requests: list[_Request] = [(server, NOTICE_BYTES, partial(server.get_state, rank)) for server in self._servers]
        deliveries = sorted(self._ask("optimizer state", requests), key=lambda delivery: delivery.server)
        return join(self._require_layout(), self._ranges, [delivery.content for delivery in deliveries])

    def load_state(self, state: Mapping[str, Tensor], *, iteration: int) -> None:
        if self._collective.rank == 0:
            parts = split(self._require_layout(), self._ranges, state)
            requests = [
                (server, NOTICE_BYTES + sum(t.nbytes for t in part.values()), partial(server.set_state, 0, part))
                for server, part in zip(self._servers, parts, strict=True)
            ]
            self._ask("optimizer state", requests)
        self._initialise(iteration=iteration)

    def abort(self, reason: str) -> None:
        self._abort_reason = reason

    def close(self) -> None:
        self._parameters, self._gradients = [], []

    # --- requests and answers -----------------------------------------------------------------------------------

    def _initialise(self, *, iteration: int) -> None:
        """Rank 0 gives the servers its parameters; nobody goes on before they have them."""
        if self._collective.rank == 0:

            def request(server: VirtualServer, shard: int) -> _Request:
                return server, server.part_bytes(shard), lambda: server.initialise(0, shard, iteration)

            self._ask("initial parameters", self._of_each_shard(request))
        self._collective.barrier()

    def _receive(
        self,
        what: str,
        requests: Sequence[_Request],
        on_delivery: Callable[[Delivery], None] | None = None,
        *,
        is_push: bool = False,
    ) -> Reply:
        """Ask, and account the time."""
        deliveries = self._ask(what, requests, on_delivery, is_push=is_push)
        elapsed_s = self._process.now_s - self._asked_s
        waits_s = [0.0] * len(self._servers)
        for delivery in deliveries:
            waits_s[delivery.server] += delivery.waiting_s
        waiting_s = min(elapsed_s, max(waits_s))
        self.timing.waiting_s += waiting_s
        self.timing.communication_s += elapsed_s - waiting_s
        pulled_bytes = sum(server.part_bytes(shard) for server in self._servers for shard in range(len(server.parts)))
        self.timing.moved_bytes += int(pulled_bytes + sum(num_bytes for _, num_bytes, _ in requests))
        # Of many shards the first server's last one decides, and speaks for all.
        heads = [self._head(deliveries, server.index) for server in self._servers]
        answers = [delivery.answer for delivery in deliveries if delivery.answer is not None]
        said = [head.answer for head in heads if head.answer is not None]
        self._clock = said[0].clock
        return Reply(
            iteration=said[0].iteration,
            staleness=tuple(answer.staleness for answer in said),
            stop=said[0].stop,
            admitted=all(answer.admitted for answer in answers),
        )

    def _ask(
        self,
        what: str,
        requests: Sequence[_Request],
        on_delivery: Callable[[Delivery], None] | None = None,
        *,
        is_push: bool = False,
    ) -> list[Delivery]:
        """Ask, and wait for as many answers.

        Args:
            is_push: pieces are pushed: a few at a time to a server elsewhere, where updates need every worker's.

        Raises:
            WireError: a server refused; the message says which, and why.
        """
        if self._abort_reason is not None:
            raise Aborted(f"{what} on rank {self._collective.rank} was ended: {self._abort_reason}")
        self._asked_s = self._process.now_s
        self._deliveries, self._num_due, self._all_here = [], len(requests), Signal()
        self._on_delivery = on_delivery or (lambda delivery: None)
        self._process.advance(self._request_s)
        self._process.post(self._send, requests, is_push)
        self._process.wait(self._all_here, lambda: f"{what}, of which {self._num_due} answer(s) are due")
        for delivery in self._deliveries:
            if delivery.error is not None:
                raise WireError(f"{what} was refused by {delivery.error}")
        return self._deliveries

    def _send(self, requests: Sequence[_Request], is_push: bool) -> None:
        self._windows = []
        for server in self._servers:
            is_in_turn = is_push and server.is_in_turn and server.host != self.host
            limit_bytes = PIECES_UNDER_WAY * FRAME_BYTES if is_in_turn else math.inf
            self._windows.append(SendWindow(limit_bytes=limit_bytes))
        for request in requests:
            server, num_bytes, _ = request
            self._windows[server.index].put(request, num_bytes)
        for server in self._servers:
            self._send_next(server.index)

    def _send_next(self, server: int) -> None:
        """What may go to this server now."""
        for asked, num_bytes, arrive in self._windows[server].take():
            self._network.send(self.host, asked.host, num_bytes, arrive)

    def _of_each_shard(self, request: Callable[[VirtualServer, int], _Request]) -> list[_Request]:
        return [request(server, shard) for server in self._servers for shard in range(len(server.parts))]

    @staticmethod
    def _head(deliveries: Sequence[Delivery], server: int) -> Delivery:
        return max((d for d in deliveries if d.server == server), key=lambda delivery: delivery.shard)

    def _require_layout(self) -> Layout:
        if self._layout is None:
            raise WireError("the servers have not been attached yet")
        return self._layout
