"""What exchanges between a worker and a real parameter server on another host take, of time and of processors."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import psutil
import torch

from paceline.comm.alone import AloneCollective
from paceline.comm.servers.group import ServerGroup
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import ServerAddress, connect_servers
from paceline.comm.wire import Keys
from paceline.layout import Layout, TensorSpec, by_group
from paceline.membership import Membership
from paceline.messages import FRAME_BYTES
from paceline.probing.echo import EPOCH
from paceline.probing.row_requests import NUM_ROUNDS, SPEC, RoundTimes, RowRounds
from paceline.probing.timing import CacheEmptier, mean_s
from paceline.records import Reporter
from paceline.server.admission import BulkSynchronous
from paceline.server.ranges import cut
from paceline.server.spec import OptimizerSpec, Push, ServerSpec

_SMALL_BYTES, _NUM_SMALL = 2**10, 200
"""Bytes of a small exchange, which take next to no time to move, and how many of them are timed."""
_FEW, _NUM_FEW = 3, 60
"""How many of these come in a row, and how many times. The first of a row finds other things in the caches; a server
that has got a core answers several requests before it loses it."""
_NUM_LARGE = 6
_LARGE_S, _ALL_LARGE_S = 0.5, 10.0
"""How long a large one is to take, and how long all of them may."""
_MIN_PIECES, _MAX_PIECES = 4, 48
_SPEC = OptimizerSpec(torch.optim.SGD, {"lr": 0.1}, ({"lr": 0.1},), element_wise=True)
_DEADLINE_S = 60.0
_PUSH = Push(groups=None, void=False, pause_at=10**9, stop=False)

T = TypeVar("T")
Swap = Callable[[str], str]
"""Gives the other rank a text for its own; both call it at the same time."""


@dataclass(frozen=True)
class ExchangeCost:
    """What it costs a worker to push a gradient and take the parameters that were updated with it."""

    request_s: float
    """Seconds of an exchange of 1 KiB, there and back."""
    request_core_s: float
    """Processor time of both ends in one, as on cores that hosts share."""
    bytes_per_core_s: float
    """Sent or received in a second of processor time, besides what each request takes."""
    row_request_s: float
    """Seconds of a request about a few rows, there and back, after a pause. Together with an exchange of 1 KiB, two of
    them are a step with rows; so what an update of these takes is among it."""
    row_request_core_s: float
    """Processor time of both ends in one."""
    row_request_variation: float
    """Standard deviation over mean of what such a request takes."""


@final
@dataclass(frozen=True)
class Exchanges:
    """Times exchanges with another rank. Each of the two has a worker and a server, as where servers are on workers'
    hosts.

    So this process does as much for an exchange of the other's as the other does for one of its own. `num_sharing`
    ranks of the probe are on this machine: their interrupts are counted together.
    """

    swap: Swap
    keys: Keys
    address: str
    reporter: Reporter
    num_sharing: int

    def measure(self) -> ExchangeCost:
        """Raises DeadlineExceeded if the other's server does not answer."""
        request_s, _ = self._measured(_SMALL_BYTES, _NUM_SMALL)
        _, request_core_s = self._measured(_SMALL_BYTES, _NUM_FEW, in_a_row=_FEW, emptier=CacheEmptier())
        piece_s, _ = self._measured(FRAME_BYTES, 1)
        piece_s = max(piece_s, float(self.swap(f"{piece_s}")))
        num_pieces = max(_MIN_PIECES, min(int(_LARGE_S / piece_s), _MAX_PIECES))
        num_large = max(1, min(int(_ALL_LARGE_S / (num_pieces * piece_s)), _NUM_LARGE))
        _, large_core_s = self._measured(num_pieces * FRAME_BYTES, num_large)
        # A byte passes both ends on its way there, and on its way back. What a request is said to take comes off, so
        # that both together are what was measured.
        passed_bytes = 4 * num_pieces * FRAME_BYTES
        bytes_per_core_s = passed_bytes / max(large_core_s - num_pieces * request_core_s, 1e-9)
        rounds, round_core_s = self._row_rounds()
        return ExchangeCost(
            request_s,
            request_core_s,
            bytes_per_core_s,
            row_request_s=max(0.0, rounds.round_s - request_s) / 2,
            row_request_core_s=max(0.0, round_core_s - request_core_s) / 2,
            row_request_variation=rounds.variation,
        )

    def _measured(
        self, num_bytes: int, count: int, *, in_a_row: int = 1, emptier: CacheEmptier | None = None
    ) -> tuple[float, float]:
        """Seconds, if caches are not emptied before each row, and processor seconds of an exchange."""

        def row() -> None:
            if emptier is not None:
                emptier()
            for _ in range(in_a_row):
                exchange()

        with self._serving(num_bytes) as endpoint, self._attached(self.swap(endpoint), num_bytes) as group:
            exchange = partial(group.exchange, _PUSH)
            exchange()
            exchange_s, core_s = self._with_core_s(lambda: mean_s(row, count) / in_a_row, emptier)
        return exchange_s, core_s / count / in_a_row

    def _row_rounds(self) -> tuple[RoundTimes, float]:
        """What a round of a step with rows takes, and of processors' time."""
        emptier = CacheEmptier()
        with self._serving(_SMALL_BYTES) as endpoint, self._attached(self.swap(endpoint), _SMALL_BYTES) as group:
            rounds = RowRounds(group.open_tables([SPEC]), partial(group.exchange, _PUSH), emptier)
            rounds.warm_up()
            times, core_s = self._with_core_s(rounds.times, emptier)
        return times, core_s / NUM_ROUNDS

    def _with_core_s(self, measure: Callable[[], T], emptier: CacheEmptier | None) -> tuple[T, float]:
        """What both ranks measure at the same time, and the processor time that this one spends meanwhile, but for
        emptying caches."""
        self.swap("begin")
        process_began_s, interrupts_began_s = time.process_time(), _interrupts_s()
        measured = measure()
        self.swap("end")
        process_s = time.process_time() - process_began_s - (0.0 if emptier is None else emptier.processor_s)
        interrupts_s = (_interrupts_s() - interrupts_began_s) / self.num_sharing
        # Packets are this process's doing; more than it takes itself are others' packets.
        return measured, process_s + min(interrupts_s, process_s)

    @contextmanager
    def _serving(self, num_bytes: int) -> Iterator[str]:
        """A server that holds so many bytes of parameters, and where one worker reaches it."""
        service = ParameterService(self.keys, host=self.address, index=0, epoch=EPOCH, reporter=self.reporter)
        thread = threading.Thread(target=service.serve, daemon=True)
        thread.start()
        try:
            layout = _layout_of(num_bytes)
            (pieces,) = cut(layout, num_servers=1, whole_tensors=False, piece_bytes=FRAME_BYTES)
            service.configure(ServerSpec(layout, pieces, _SPEC, BulkSynchronous(Membership.first(1)), max_updates=None))
            yield service.endpoint
        finally:
            service.stop()
            thread.join()

    @contextmanager
    def _attached(self, endpoint: str, num_bytes: int) -> Iterator[ServerGroup]:
        """A worker's way to that server."""
        group = connect_servers(
            self.keys,
            servers=[ServerAddress(endpoint, bell=None)],
            collective=AloneCollective(),
            configure=lambda layout, spec, ranges: None,  # the server has been
            epoch=EPOCH,
            deadline_s=_DEADLINE_S,
        )
        try:
            layout = _layout_of(num_bytes)
            group.attach(layout, _SPEC, group.allocate(layout.num_bytes), group.allocate(layout.num_bytes))
            yield group
        finally:
            group.close()


def _interrupts_s() -> float:
    """Seconds that the whole machine has spent on interrupts so far."""
    machine = psutil.cpu_times()
    return float(getattr(machine, "irq", 0.0) + getattr(machine, "softirq", 0.0))


def _layout_of(num_bytes: int) -> Layout:
    return by_group([TensorSpec("weights", (num_bytes // 4,), torch.float32)])
