"""Servers' cores that lend their shards, and workers on their host that serve themselves, in one process."""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from paceline.comm.servers.lending import Lending, can_lend
from paceline.comm.servers.loan import Loan
from paceline.comm.servers.self_service import SelfService, SelfServices
from paceline.comm.shared_memory.block import SharedBlock
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.messages import Kind, Message
from paceline.server.actions import Send
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.server.closing import Applied
from paceline.server.ranges import cut
from paceline.server.server_core import ServerCore
from paceline.server.spec import OptimizerSpec, ServerSpec

SGD = OptimizerSpec(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ({"lr": 0.1}, {"lr": 0.02}), element_wise=True)
ADAM = OptimizerSpec(torch.optim.Adam, {"lr": 0.1}, ({"lr": 0.1}, {"lr": 0.02}), element_wise=True)
LAYOUT = by_group([TensorSpec("weight", (40, 9), torch.float32, 0), TensorSpec("bias", (7,), torch.float32, 1)])
FOREVER = 10**9


Rule = Callable[[int], AdmissionRule]


class Site:
    """Servers' cores, and the workers on their host.

    Args:
        joiners: workers that servers know besides, and that take part later; servers outlive workers then.
    """

    def __init__(
        self,
        rule: Rule,
        size: int,
        optimizer: OptimizerSpec = SGD,
        *,
        servers: int = 1,
        max_updates: int | None = None,
        joiners: int | None = None,
    ) -> None:
        ranges = cut(LAYOUT, num_servers=servers, whole_tensors=False)
        specs = [
            ServerSpec(LAYOUT, pieces, optimizer, rule(size), max_updates, outlives_workers=joiners is not None)
            for pieces in ranges
        ]
        size += joiners or 0
        assert all(map(can_lend, specs))
        self.cores = [ServerCore(index=index, epoch=1) for index in range(servers)]
        self.gradients = [SharedBlock.create(LAYOUT.num_bytes) for _ in range(size)]
        for block in self.gradients:
            block.close_descriptor()
        self.parameters = [torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8) for _ in range(size)]
        for rank in range(size):
            self.gradients[rank].tensor.view(torch.float32).copy_(torch.arange(LAYOUT.num_bytes // 4) * (rank + 1) / 7)
        for core, spec in zip(self.cores, specs, strict=True):
            core.configure(spec)
            for rank in range(size):
                message = Message(Kind.ATTACH, 1, sender=rank)
                memory = {"gradients": self.gradients[rank].tensor, "parameters": self.parameters[rank]}
                core.attach(message, **memory, is_beside=True)
        self.ask(Message(Kind.INITIALISE, 1))
        self.lendings = list(map(Lending, specs))
        blocks = [SharedBlock.open(lending.address) for lending in self.lendings]
        for lending in self.lendings:
            lending._block.close_descriptor()
        self.each = [
            [
                SelfService(
                    Loan(block.tensor, LAYOUT, pieces, lending.num_places),
                    worker=rank,
                    pieces=pieces,
                    parameters=[piece.view(LAYOUT, self.parameters[rank]) for piece in pieces],
                    spec=optimizer,
                    open_gradients=lambda addresses, pieces=pieces: [
                        [piece.view(LAYOUT, self.tensor_at(address)) for piece in pieces] for address in addresses
                    ],
                )
                for block, lending, pieces in zip(blocks, self.lendings, ranges, strict=True)
            ]
            for rank in range(size)
        ]
        self.workers = list(map(SelfServices, self.each))

    def tensor_at(self, address: Sequence[int]) -> Tensor:
        return next(own.tensor for own in self.gradients if list(astuple(own.address)) == address)

    def ask(self, message: Message) -> list[Message]:
        """Of all servers."""
        said = [action for core in self.cores for action in core.receive(message, 0.0)]
        return [action.message for action in said if isinstance(action, Send)]

    def push_by_message(self, rank: int, clock: int) -> list[Message]:
        return self.ask(Message(Kind.EXCHANGE, 1, sender=rank, clock=clock, pause_at=FOREVER))

    def step_by_message(self, clock: int) -> None:
        for rank in range(len(self.workers)):
            self.push_by_message(rank, clock)

    def lend(self) -> None:
        for core, lending in zip(self.cores, self.lendings, strict=True):
            assert core.is_quiet
            gradients = {rank: astuple(self.gradients[rank].address) for rank in sorted(core.attendance.active)}
            lending.lend(core.parts, gradients)

    def take_back(self) -> list[Applied]:
        """What the first server is told."""
        first, *_ = [lending.take_back(core.parts) for core, lending in zip(self.cores, self.lendings, strict=True)]
        return first.applied

    @property
    def shard(self) -> list[Tensor]:
        """All that the servers' shards hold."""
        parts = [part for core in self.cores for part in core.parts]
        own = [tensor for part in parts for tensor in part.shard.parameters]
        states = [part.shard.optimizer.state.values() for part in parts]
        return [*own, *(value for some in states for state in some for value in state.values())]

    @property
    def clocks(self) -> list[object]:
        return [part.shard.clocks() for core in self.cores for part in core.parts]


def bsp(size: int) -> AdmissionRule:
    return BulkSynchronous(Membership.first(size))


def asp(size: int) -> AdmissionRule:
    return StaleSynchronous(Membership.first(size), staleness=math.inf)
