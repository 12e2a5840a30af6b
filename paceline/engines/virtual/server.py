"""A parameter server on a virtual host: the core that real servers have, asked over the simulated network."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, final

import torch
from torch import Tensor

from paceline.engines.blame import Statement, judge
from paceline.engines.scripting import outcome_of
from paceline.engines.virtual.computing.cores import Thread
from paceline.engines.virtual.computing.requests import RequestCosts
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.network.links import Network
from paceline.messages import ABOUT_ROWS, ALL_SHARDS, Kind, Message
from paceline.records import Reporter
from paceline.server.actions import Action, Send, Updated
from paceline.server.admission import Decisions
from paceline.server.server_core import ServerCore
from paceline.server.spec import ServerSpec

EPOCH = 1


class Client(Protocol):
    """One worker, as servers reach it for one of the run's optimizers."""

    host: int
    number: int
    """The optimizer's number."""

    def deliver(self, server: int, message: Message) -> None: ...


@final
class VirtualServer:
    """Takes messages on the timeline, when they have arrived.

    Requests are worked on one after the other: a push of a shard, or a request about rows. `costs` say how long each
    takes, and how much of that needs the core of a `thread`, where others share it. What comes coded is decoded on the
    same core; on a host of speed 1 an operation of the codec takes `operation_s` besides its bytes. An update takes the
    time of moving what it reads and writes through the host's memory; rows, which lie scattered there, are picked out
    and put back at their own rate.
    """

    def __init__(
        self,
        timeline: EventQueue,
        network: Network,
        *,
        index: int,
        host: int,
        memory_bytes_per_s: float,
        row_bytes_per_s: float,
        reporter: Reporter,
        costs: RequestCosts,
        speed: float = 1.0,
        operation_s: float = 0.0,
        thread: Thread | None = None,
    ) -> None:
        self.core = ServerCore(index=index, epoch=EPOCH)
        self.host = host
        self._cores = [self.core]  # one for each of the run's optimizers
        self._clients: dict[tuple[int, int], Client] = {}  # by the optimizer's number and the rank
        self._timeline, self._network, self._reporter = timeline, network, reporter
        self._memory_bytes_per_s, self._row_bytes_per_s = memory_bytes_per_s, row_bytes_per_s
        self._costs, self._speed, self._operation_s, self._thread = costs, speed, operation_s, thread
        self._free_s = 0.0
        self.pushed_s: dict[int, float] = {}
        """By worker, when the first one of the run's optimizers had word of its last push."""

    def configure(self, spec: ServerSpec) -> None:
        """Build the shards for one optimizer; called once for each, in order."""
        if spec.number:
            self._cores.append(ServerCore(index=self.core.index, epoch=EPOCH))
        self._cores[spec.number].configure(spec)

    def let_go(self, worker: int, counts: Message | None, decided: Decisions) -> None:
        """As `Attendance.let_go`, of the run's one optimizer."""
        self._do(0, partial(self.core.attendance.let_go, worker, counts, self._timeline.now_s, decided=decided))

    def let_in(self, worker: int, clock: int) -> None:
        """As `Attendance.let_in`."""
        self._do(0, partial(self.core.attendance.let_in, worker, clock, self._timeline.now_s))

    def receive(self, client: Client, message: Message) -> None:
        """The worker's message has come; one that attaches says where its buffers are."""
        number, core = client.number, self._cores[client.number]
        if message.kind is Kind.ATTACH:
            self._clients[number, message.sender] = client
            about = core.attach(message, **message.body, is_beside=client.host == self.host)
            self._send(client, core.message(Kind.OK, body=about))
            return
        num_requests = 1 if message.kind in ABOUT_ROWS else 0
        if message.kind is Kind.EXCHANGE:
            num_requests = len(core.parts) if message.shard == ALL_SHARDS else 1
        cost, decode_s = self._costs.next(about_rows=message.kind in ABOUT_ROWS), 0.0
        if message.kind is Kind.EXCHANGE and client.host != self.host:
            decode_s = core.intake.decode_s(message, operation_s=self._operation_s) / self._speed
        if self._thread is None:
            self._take(client, message, num_requests * cost.duration_s + decode_s)
        else:
            core_s = num_requests * cost.of_core_s(is_beside=client.host == self.host)
            left_s = max(0.0, num_requests * cost.duration_s - core_s)
            self._thread.run(core_s + decode_s, self._take, client, message, left_s)

    def _take(self, client: Client, message: Message, request_s: float) -> None:
        """The message is looked at, which takes `request_s` more."""
        number, core, now_s = client.number, self._cores[client.number], self._timeline.now_s
        if message.kind in ABOUT_ROWS:
            self._work(request_s + message.tensor_bytes / self._row_bytes_per_s)
        if message.kind is Kind.EXCHANGE:
            self.pushed_s[message.sender] = now_s
            self._work(request_s)
        self._do(number, partial(core.receive, message, now_s), about_rows=message.kind in ABOUT_ROWS)

    def _work(self, duration_s: float) -> None:
        """Be at something for so long, after whatever this server is at."""
        self._free_s = max(self._timeline.now_s, self._free_s) + duration_s

    def _do(self, number: int, decide: Callable[[], Iterator[Action]], *, about_rows: bool = False) -> None:
        """What one of the cores decides, now; and again when it is to be woken."""
        core, now_s = self._cores[number], self._timeline.now_s
        for action in self._actions(decide):
            if isinstance(action, Send):
                if about_rows:
                    self._work(action.message.tensor_bytes / self._row_bytes_per_s)
                self._send(self._clients[number, action.to], action.message)
            elif isinstance(action, Updated):
                row_s = action.row_bytes / self._row_bytes_per_s
                self._work(_touched_bytes(action) / self._memory_bytes_per_s + row_s)
                for record in action.records if core is self.core else ():
                    self._reporter.emit(record)
        wakes_at_s = core.wakes_at_s
        if wakes_at_s is not None and wakes_at_s > now_s:
            self._timeline.at(wakes_at_s, self._do, number, partial(core.tick, wakes_at_s))

    def _actions(self, decide: Callable[[], Iterator[Action]]) -> Iterator[Action]:
        """Raises RunFailed or UsageError, worded as a real server's failure, if the server cannot go on."""
        try:
            yield from decide()
        except Exception as error:
            num_steps = self.core.iteration
            failed = Statement(f"server-{self.core.index}", None, num_steps, outcome_of(error, num_steps=num_steps))
            raise judge([failed], is_training=True, is_synchronous=True) from error

    def _send(self, client: Client, message: Message) -> None:
        """Send it when the server is through with what it is at."""
        send = partial(self._network.send, is_answer=True)
        num_bytes = float(message.num_bytes)
        self._timeline.at(
            self._free_s, send, self.host, client.host, num_bytes, client.deliver, self.core.index, message
        )


def _touched_bytes(updated: Updated) -> float:
    shard = updated.part.shard
    own_state_bytes = state_bytes(shard.optimizer, shard.parameters)
    return update_bytes(updated.num_contributions, updated.part.tensor_bytes, own_state_bytes)


def update_bytes(num_gradients: int, parameter_bytes: float, state_bytes: float) -> float:
    """What an update reads and writes: gradients, their mean if there are several, parameters and optimizer state."""
    num_passes = num_gradients + (2 if num_gradients > 1 else 0) + 2
    return num_passes * parameter_bytes + 2 * state_bytes


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> float:
    """Bytes of the optimizer's state in tensors as large as their parameters, such as momentum."""
    return float(
        sum(
            value.nbytes
            for parameter in parameters
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.numel() == parameter.numel()
        )
    )
