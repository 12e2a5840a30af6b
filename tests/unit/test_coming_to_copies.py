"""Over real sockets: who comes while a server dies is served by its copy, which reads what the dead leave."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace

import pytest
import torch

from paceline.comm.alone import AloneCollective
from paceline.comm.servers.group import Joins
from paceline.comm.servers.holding import Holding
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import Move, Moves, ServerAddress, connect_servers
from paceline.comm.shared_memory.block import SharedBlock
from paceline.comm.wire import Keys
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.messages import Kind, Message
from paceline.records import NullReporter
from paceline.server import entries
from paceline.server.admission import StaleSynchronous
from paceline.server.chains import Chain, Chains
from paceline.server.ranges import cut
from paceline.server.spec import OptimizerSpec, Push, ServerSpec

EPOCH, JOINER, FOREVER = 1, 2, 10**9
LAYOUT = by_group([TensorSpec("weight", (64,), torch.float32, 0)])
SGD = OptimizerSpec(torch.optim.SGD, {"lr": 1.0}, ({"lr": 1.0},), element_wise=True)


def specs() -> list[ServerSpec]:
    return [
        ServerSpec(LAYOUT, pieces, SGD, StaleSynchronous(Membership(EPOCH, (0, 1))), None, outlives_workers=True)
        for pieces in cut(LAYOUT, num_servers=2, whole_tensors=False)
    ]


@contextmanager
def services(keys: Keys, chains: Sequence[Chain]) -> Iterator[list[ParameterService]]:
    """Of two servers with copies, of which the first does not answer."""
    both = [
        ParameterService(keys, host="127.0.0.1", index=index, epoch=EPOCH, reporter=NullReporter())
        for index in range(2)
    ]
    endpoints = {index: service.endpoint for index, service in enumerate(both)}
    for chain, spec in zip(chains, specs(), strict=True):
        both[1].replicate(spec, chain, endpoints=endpoints)
    thread = threading.Thread(target=both[1].serve)
    thread.start()
    try:
        yield both
    finally:
        both[1].stop()
        thread.join()
        both[0]._close()


@pytest.mark.parametrize("is_gone", [False, True], ids=["silent", "gone"])
def test_a_worker_that_comes_as_a_server_dies_goes_to_its_copy(is_gone: bool) -> None:
    """It has asked the dead one already, by a line that the other is not to open; or cannot reach it any more."""
    keys, moves = Keys.generate(), Moves()
    chains = Chains.first(["a", "a"], replicas=1, epoch=EPOCH)
    with services(keys, chains.chains) as (first, second):
        bell = replace(first.bell, inode=first.bell.inode + 1) if is_gone else first.bell
        left, changed = chains.died(0)
        for chain in changed:
            second.reform(left.changed(chain).chains[chain.key_range])
        address = ServerAddress(second.endpoint, second.bell, epoch=left.chains[0].epoch, copy_of=0)
        moves.append(Move(0, address))
        group = connect_servers(
            keys,
            servers=[ServerAddress(first.endpoint, bell), ServerAddress(second.endpoint, second.bell)],
            collective=AloneCollective(),
            configure=lambda *_: None,
            epoch=EPOCH,
            deadline_s=60.0,
            moves=moves,
            joins=Joins(JOINER, in_pieces=False),
        )
        try:
            parameters, gradients = group.allocate(LAYOUT.num_bytes), group.allocate(LAYOUT.num_bytes)
            group.attach(LAYOUT, SGD, parameters, gradients)
            for key_range in range(2):
                second.let_in(key_range, JOINER, second.expect(key_range, JOINER))
            LAYOUT.views(gradients)[0].fill_(-1.0)
            assert group.wait_for_admission(pause_at=FOREVER).admitted
            assert group.exchange(Push(pause_at=FOREVER)).staleness == (0, 0)
            group.pull()
            assert LAYOUT.views(parameters)[0].tolist() == [1.0] * 64
        finally:
            group.close()


def test_memory_that_is_open_stays_so_when_its_worker_has_died() -> None:
    """It had attached to another copy anew, and was dead when this one heard of it."""
    chain = Chains.first(["a", "a", "a"], replicas=2, epoch=EPOCH).chains[0]
    server = chain.servers[-1]
    holding = Holding(index=0, number=0, epoch=EPOCH, reporter=NullReporter(), send=lambda *_: None, is_copy=True)
    holding.configure(specs()[0])
    holding.replicate(chain, server=server, send_on=lambda *_: None)
    gradients = SharedBlock.create(LAYOUT.num_bytes)
    LAYOUT.views(gradients.tensor)[0].fill_(3.0)
    attached = Message(Kind.ATTACH, EPOCH, sender=1, body={"gradients": list(astuple(gradients.address))})
    for number in (1, 2):
        entry = entries.of_attached(attached)
        entry.sender, entry.epoch, entry.clock = chain.servers[-2], EPOCH, number
        holding.handle_copy(chain.servers[-2], entry.encode())
        gradients.close_descriptor()
    holding.reform(replace(chain, servers=(server,), epoch=EPOCH + 1))
    push = Message(Kind.EXCHANGE, EPOCH, sender=1, pause_at=FOREVER)
    holding.let_go(1, push, {}, lambda _: None)
    (parameters,) = (part.shard.parameters for part in holding.core.parts)
    assert parameters[0].tolist() == [-3.0] * 32
    holding.close()
