"""A worker attached to servers in threads of this process, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.comm.alone import AloneCollective
from paceline.comm.servers.group import ServerGroup
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import ServerAddress, connect_servers
from paceline.comm.wire import Keys
from paceline.layout import Layout
from paceline.records import NullReporter
from paceline.server.admission import AdmissionRule
from paceline.server.ranges import KeyRange
from paceline.server.spec import OptimizerSpec, ServerSpec

EPOCH = 1


@contextmanager
def attached(
    layout: Layout,
    optimizer: OptimizerSpec,
    rule: AdmissionRule,
    *,
    are_here: Sequence[bool],
    is_beside_another: bool = False,
) -> Iterator[ServerGroup]:
    """Worker 0 and its servers.

    Args:
        are_here: which of the servers are on the worker's host.
        is_beside_another: the first server shares its host with another worker, as far as it knows.
    """
    keys = Keys.generate()
    services = [
        ParameterService(keys, host="127.0.0.1", index=index, epoch=EPOCH, reporter=NullReporter())
        for index in range(len(are_here))
    ]
    if is_beside_another:
        services[0]._first.core._answering.has_neighbour = True
    threads = [threading.Thread(target=service.serve) for service in services]
    for thread in threads:
        thread.start()

    def configure(layout: Layout, spec: OptimizerSpec, ranges: Sequence[KeyRange]) -> None:
        for service, pieces in zip(services, ranges, strict=True):
            service.configure(ServerSpec(layout, pieces, spec, rule, max_updates=None))

    group = connect_servers(
        keys,
        servers=[
            ServerAddress(service.endpoint, service.bell if is_here else None)
            for service, is_here in zip(services, are_here, strict=True)
        ],
        collective=AloneCollective(),
        configure=configure,
        epoch=EPOCH,
        deadline_s=60.0,
    )
    try:
        parameters, gradients = group.allocate(layout.num_bytes), group.allocate(layout.num_bytes)
        group.attach(layout, optimizer, parameters, gradients)
        yield group
    finally:
        group.close()
        for service, thread in zip(services, threads, strict=True):
            service.stop()
            thread.join()
