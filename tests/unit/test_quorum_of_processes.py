"""A worker process is killed when the first server has made a round of its change, and the second has not been told:
real servers, reached in shared memory and over sockets. The launcher's half is what `LettingGo` asks servers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

import pytest
import torch

from paceline.comm.alone import AloneCollective
from paceline.comm.servers.group import Joins, ServerGroup
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import ServerAddress, connect_servers
from paceline.comm.wire import Keys
from paceline.elastic import Done
from paceline.layout import Layout, TensorSpec, by_group
from paceline.membership import Membership
from paceline.records import NullReporter
from paceline.server.admission import Quorum
from paceline.server.pushing import Pushing
from paceline.server.ranges import KeyRange
from paceline.server.spec import OptimizerSpec, Push, ServerSpec
from paceline.server.whole_pushes import what_counts

FORKS = multiprocessing.get_context("fork")  # before this process has threads
EPOCH, FOREVER, ITS_PUSHES = 1, 10**9, 3
LAYOUT = by_group([TensorSpec("weight", (64,), torch.float64)])
SGD = OptimizerSpec(torch.optim.SGD, {"lr": 1.0}, ({"lr": 1.0},), element_wise=True)


def push(group: ServerGroup, gradients: torch.Tensor, number: int) -> None:
    """Take one from each parameter."""
    for tensor in LAYOUT.views(gradients):
        tensor.fill_(1.0)
    group.exchange(Push(pause_at=FOREVER, done=Done(0, number, steps=number)))


def work(told: Connection, *, in_pieces: bool) -> None:
    """`told`: the run's keys, and where its servers are."""
    keys, addresses = told.recv()
    group = connect_servers(
        keys,
        servers=addresses,
        collective=AloneCollective(),
        configure=lambda *_: None,
        epoch=EPOCH,
        deadline_s=60.0,
        joins=Joins(1, in_pieces),
    )
    parameters, gradients = group.allocate(LAYOUT.num_bytes), group.allocate(LAYOUT.num_bytes)
    group.attach(LAYOUT, SGD, parameters, gradients)
    for number in range(1, ITS_PUSHES + 1):
        if number == ITS_PUSHES:
            Pushing.follow_up = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]
        push(group, gradients, number)


@pytest.mark.parametrize("are_here", [[True, True], [False, False], [True, False], [False, True]], ids=str)
def test_what_a_killed_worker_has_told_one_server_all_do(are_here: list[bool]) -> None:
    told, tell = FORKS.Pipe(duplex=False)
    dead = FORKS.Process(target=work, args=(told,), kwargs={"in_pieces": not all(are_here)})
    dead.start()
    keys, rule = Keys.generate(), Quorum(Membership.first(2), quorum=1)
    services = [
        ParameterService(keys, host="127.0.0.1", index=index, epoch=EPOCH, reporter=NullReporter()) for index in (0, 1)
    ]
    threads = [threading.Thread(target=service.serve) for service in services]
    for thread in threads:
        thread.start()

    def configure(layout: Layout, spec: OptimizerSpec, ranges: Sequence[KeyRange]) -> None:
        for service, pieces in zip(services, ranges, strict=True):
            service.configure(ServerSpec(layout, pieces, spec, rule, max_updates=None, outlives_workers=True))

    addresses = [
        ServerAddress(service.endpoint, service.bell if is_here else None)
        for service, is_here in zip(services, are_here, strict=True)
    ]
    group = connect_servers(
        keys, servers=addresses, collective=AloneCollective(), configure=configure, epoch=EPOCH, deadline_s=60.0
    )
    try:
        parameters, gradients = group.allocate(LAYOUT.num_bytes), group.allocate(LAYOUT.num_bytes)
        group.attach(LAYOUT, SGD, parameters, gradients)
        tell.send((keys, addresses))
        dead.join(timeout=60.0)
        assert dead.exitcode == -signal.SIGKILL
        other = threading.Thread(target=push, args=(group, gradients, 1))
        other.start()
        other.join(timeout=0.3)
        assert other.is_alive(), "the second server does not know of the dead one's round"
        counts = what_counts([service.part_with(index, 1) for index, service in enumerate(services)])
        assert counts is not None
        assert counts.body["done"][1] == ITS_PUSHES
        decided = services[0].let_go(0, 1, counts, {})
        services[1].let_go(1, 1, counts, decided)
        other.join(timeout=30.0)
        assert not other.is_alive()
        group.pull()
        (weight,) = LAYOUT.views(parameters)
        assert weight.tolist() == [-float(ITS_PUSHES + 1)] * 64
    finally:
        group.close()
        for service, thread in zip(services, threads, strict=True):
            service.stop()
            thread.join()
