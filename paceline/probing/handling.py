"""What exchanging with a parameter server takes of processors, at both ends."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from paceline.comm.alone import AloneCollective
from paceline.comm.base import OptimizerSpec, Push
from paceline.comm.parameter_service import ParameterService, ServerSpec
from paceline.comm.server_group import ServerAddress, ServerGroup
from paceline.comm.wire import FRAME_BYTES, Caller, Keys
from paceline.layout import Layout, TensorSpec, by_group
from paceline.probing.echo import EPOCH, ask
from paceline.records import NullReporter
from paceline.server.admission import BulkSynchronous
from paceline.server.ranges import KeyRange

_NUM_PIECES = 48
"""More than caches hold, as with a model that is worth several servers."""
_NUM_ROUNDS = 5
_DEADLINE_S = 60.0
_FOREVER = 10**9


def measure_handling(keys: Keys, address: str, endpoint: str) -> tuple[float, float]:
    """Bytes sent or received in one second of processor time: only packed and taken in, and really exchanged.

    Both ends are in this process, so that no link's rate matters. What is pushed to the echo at `endpoint` is
    encrypted, sent, received and copied. What is exchanged with a server is looked at and applied, besides, and the
    parameters go the way back. They are measured in turns, since what matters is how much more the latter takes.

    Raises:
        WireError, DeadlineExceeded: this host is too busy to say.
    """
    push = Push(groups=None, void=False, pause_at=_FOREVER, stop=False)
    caller = Caller(keys, endpoint=endpoint, identity="packer")
    try:
        with _attached(keys, address) as group:
            rounds = [
                (
                    _processor_s(partial(ask, caller, _NUM_PIECES, bytes(FRAME_BYTES))),
                    _processor_s(partial(group.exchange, push)),
                )
                for _ in range(1 + _NUM_ROUNDS)
            ]
    finally:
        caller.close()
    packing_s, exchange_s = (statistics.median(times_s) for times_s in zip(*rounds[1:], strict=True))
    # Counted at each end; an exchange goes there and back.
    passed_bytes = 2.0 * _NUM_PIECES * FRAME_BYTES
    return passed_bytes / packing_s, 2 * passed_bytes / exchange_s


def _processor_s(action: Callable[[], object]) -> float:
    began_s = time.process_time()
    action()
    return max(time.process_time() - began_s, 1e-9)


@contextmanager
def _attached(keys: Keys, address: str) -> Iterator[ServerGroup]:
    """A worker's end of a server that it takes to be on another host."""
    service = ParameterService(keys, host=address, index=0, epoch=EPOCH, reporter=NullReporter())

    def configure(layout: Layout, spec: OptimizerSpec, ranges: Sequence[KeyRange]) -> None:
        service.configure(ServerSpec(layout, ranges[0], spec, BulkSynchronous(num_workers=1), max_updates=None))

    thread = threading.Thread(target=service.serve, daemon=True)
    thread.start()
    group = ServerGroup(
        keys,
        servers=[ServerAddress(service.endpoint, bell=None)],
        collective=AloneCollective(),
        configure=configure,
        epoch=EPOCH,
        deadline_s=_DEADLINE_S,
    )
    try:
        layout = by_group([TensorSpec("weights", (_NUM_PIECES * FRAME_BYTES // 4,), torch.float32)])
        spec = OptimizerSpec(torch.optim.SGD, {"lr": 0.1}, ({"lr": 0.1},), element_wise=True)
        parameters, gradients = group.allocate(layout.num_bytes), group.allocate(layout.num_bytes)
        group.attach(layout, spec, parameters, gradients)
        yield group
    finally:
        group.close()
        service.stop()
        thread.join()
