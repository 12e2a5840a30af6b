"""Both ends of the protocol, with messages between them that arrive in any order, except those of one pair."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.aggregate import MEAN, Aggregator
from paceline.layout import TensorSpec, by_group
from paceline.messages import Kind, Message
from paceline.records import UpdateRecord
from paceline.server.actions import Send, Updated
from paceline.server.admission import AdmissionRule, BulkSynchronous, Quorum, StaleSynchronous
from paceline.server.client_core import ClientCore
from paceline.server.coded_push import PushCoding
from paceline.server.conversation import Conversation
from paceline.server.ranges import cut
from paceline.server.server_core import ServerCore
from paceline.server.spec import OptimizerSpec, Push, ServerSpec

EPOCH, FOREVER, LR = 4, 10**9, 0.5
LAYOUT = by_group([TensorSpec("weight", (96,), torch.float32), TensorSpec("bias", (5,), torch.float64)])
SPEC = OptimizerSpec(torch.optim.SGD, {"lr": LR}, ({"lr": LR},), element_wise=True)


class Net:
    """Workers and servers. What is sent is encoded, and decoded as it arrives.

    Args:
        beside: of each worker, whether each server is on its host.
        outlives_workers: these may die.
        coding: of what each worker pushes; none: it goes as it is.
        aggregator: of the servers.
    """

    def __init__(
        self,
        rules: Iterable[AdmissionRule],
        beside: list[list[bool]],
        *,
        randomness: random.Random,
        piece_bytes: int,
        outlives_workers: bool = False,
        coding: Sequence[PushCoding] = (),
        aggregator: Aggregator = MEAN,
    ) -> None:
        rules, codec = list(rules), coding[0].codec if coding else None
        self.servers = [ServerCore(index=index, epoch=EPOCH) for index in range(len(rules))]
        ranges = cut(LAYOUT, num_servers=len(rules), whole_tensors=False, piece_bytes=piece_bytes)
        for server, pieces, rule in zip(self.servers, ranges, rules, strict=True):
            spec = ServerSpec(LAYOUT, pieces, SPEC, rule, None, aggregator, codec, outlives_workers=outlives_workers)
            server.configure(spec)
        self.clients = [ClientCore(rank=rank, epoch=EPOCH, beside=each) for rank, each in enumerate(beside)]
        self.buffers = [[torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8) for _ in range(2)] for _ in beside]
        self.under_way: dict[tuple[bool, int, int], deque[list[Any]]] = {}
        """To the server or from it, worker, server."""
        self.now_s = 0.0
        self.records: list[UpdateRecord] = []
        self.errors: list[int] = []
        self.bytes: Counter[int] = Counter()
        """Of the messages of each worker."""
        self.talks: dict[int, Conversation] = {}
        """By worker, if it is about tables, what it asks."""
        self._beside, self._random = beside, randomness
        for rank, client in enumerate(self.clients):
            parameters, gradients = self.buffers[rank]
            memory = [{"beside": is_beside} for is_beside in beside[rank]]
            own = {"parameters": parameters, "gradients": gradients, "coding": coding[rank] if coding else None}
            self.ask(rank, client.attach(LAYOUT, ranges, whole=False, bodies=memory, **own))
            self.run()
            client.attached()
        self.ask(0, self.clients[0].initialise(iteration=0))
        self.run()

    def views(self, worker: int) -> list[Tensor]:
        """A worker's parameters."""
        return LAYOUT.views(self.buffers[worker][0])

    def push(self, worker: int, value: float, **push: Any) -> None:
        for gradient in LAYOUT.views(self.buffers[worker][1]):
            gradient.fill_(value)
        pushed = Push(**{"pause_at": FOREVER, **push})
        self.clients[worker].encode(pushed)
        self.ask(worker, self.clients[worker].exchange(pushed))

    def is_idle(self, worker: int) -> bool:
        """Whether all that it has asked is answered."""
        return self.clients[worker].is_done

    def ask(self, worker: int, sends: Iterable[Send]) -> None:
        for server, message in sends:
            self.bytes[worker] += message.num_bytes
            self._put(True, worker, server, message)

    def run(self) -> None:
        """Until nothing is under way."""
        while ways := [way for way, queue in self.under_way.items() if queue]:
            way = self._random.choice(ways)
            self.deliver(way, Message.decode(self.under_way[way].popleft(), epoch=EPOCH))

    def deliver(self, way: tuple[bool, int, int], message: Message) -> None:
        is_request, worker, server = way
        if not is_request:
            self.bytes[worker] += message.num_bytes
            self.ask(worker, self.talks.get(worker, self.clients[worker]).receive(server, message))
            return
        core = self.servers[server]
        if message.kind is Kind.ATTACH:
            parameters, gradients = self.buffers[worker] if message.body["beside"] else (None, None)
            about = core.attach(message, gradients=gradients, parameters=parameters, is_beside=message.body["beside"])
            self._put(False, worker, server, core.message(Kind.OK, body=about))
            return
        for action in core.receive(message, self.now_s):
            if isinstance(action, Send):
                self._put(False, action.to, server, action.message)
            elif isinstance(action, Updated):
                self.records += action.records

    def _put(self, is_request: bool, worker: int, server: int, message: Message) -> None:
        if message.kind is Kind.ERROR:
            self.errors.append(worker)
            return
        queue = self.under_way.setdefault((is_request, worker, server), deque())
        queue.append([bytes(frame) for frame in message.encode()])


def gradient(worker: int, clock: int) -> float:
    return float((worker + 1) * (clock + 2) % 7)


RULES = {
    "bsp": partial(BulkSynchronous),
    "backup": partial(BulkSynchronous, backup_workers=1),
    "quorum": partial(Quorum, quorum=1),
    "ssp": partial(StaleSynchronous, staleness=1),
    "asp": partial(StaleSynchronous),
}


def train(net: Net, num_steps: int, *, meets: bool = False) -> list[int]:
    """Each worker pushes so many times, whenever it may, and then, if they meet, waits for all; how far each came."""
    steps = [0] * len(net.clients)
    is_asking = [False] * len(steps)

    def go_on() -> None:
        for worker, client in enumerate(net.clients):
            if is_asking[worker] and client.is_done:
                client.require_done()
                assert steps[worker] == num_steps or client.reply().admitted
                is_asking[worker] = False
                steps[worker] += 1
            if not is_asking[worker] and steps[worker] < num_steps:
                net.push(worker, gradient(worker, steps[worker]))
                is_asking[worker] = True
            elif not is_asking[worker] and steps[worker] == num_steps and meets:
                net.ask(worker, client.step_aside())
                is_asking[worker] = True

    go_on()
    while ways := [way for way, queue in net.under_way.items() if queue]:
        way = net._random.choice(ways)
        net.deliver(way, Message.decode(net.under_way[way].popleft(), epoch=EPOCH))
        go_on()
    return steps
