"""What passes between the hosts of a cluster, over the sockets that runs use, and what exchanges cost beside that."""

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store

from paceline.comm.algorithms.pieces import exchange
from paceline.comm.base import Collective
from paceline.comm.process_group.collective import connect_gloo
from paceline.comm.wire import Caller, Keys
from paceline.engines.ray.nodes import own_address
from paceline.engines.world import current
from paceline.messages import FRAME_BYTES, Kind, Message
from paceline.probing import bursts, coding
from paceline.probing.bursts import MessageCost
from paceline.probing.echo import EPOCH, PING_BYTES, Echo
from paceline.probing.exchanging import ExchangeCost, Exchanges
from paceline.probing.sharing import NUM_TRIES, answered, await_answer, connected, measure_unevenness, unevenness_of
from paceline.probing.step_times import tell
from paceline.probing.timing import CacheEmptier, core_s, mean_s, median_s
from paceline.records import Reporter
from paceline.server.tables.row_optimizers import Adagrad
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.server.tables.table import Table

_NUM_PINGS = 40
_TEXT_BYTES = 256  # of a text that two ranks give each other, which is shorter
_STREAM_S = 0.8  # how long a measured stream lasts, at the rate of the first pieces
_MIN_PIECES, _MAX_PIECES = 8, 128
_FIRST_PIECES = 3
_LEAST_INCAST = 3  # hosts, for two of them to send to one at the same time
_CONNECT_S = 10.0
_MEMORY_BYTES = 2**26
_NUM_UPDATES = 5
_NUM_ROWS, _ROW_WIDTH, _ROWS_A_BATCH, _NUM_ROW_UPDATES = 2**16, 64, 2**12, 20
_NUM_SINGLE_PIECES = 5
_SILENCE_S = 0.05  # for a token bucket to fill, but too short for TCP to forget its window


@dataclass(frozen=True)
class PairReport:
    """One host's way to another."""

    source: int
    destination: int
    latency_s: float
    """One way, of 8 bytes over plain TCP."""
    bytes_per_s: float
    """Rate of a stream between two ranks."""
    pushed_bytes_per_s: float
    """Rate at which pieces are pushed to a server."""
    piece_s: float
    """Seconds that a request with a piece takes longer than an empty one, there and back, after a silence."""
    message: MessageCost
    """What small messages cost the two."""
    exchange: ExchangeCost
    """What an exchange with a parameter server there costs."""


@dataclass(frozen=True)
class NetworkReport:
    address: str
    rank: int
    pairs: tuple[PairReport, ...]
    """What was measured from this rank to others."""
    packing_bytes_per_s: float
    """Pushed, or taken in as a server does, in one second of processor time."""
    operation_s: float
    """Seconds of a small all-reduce among all ranks."""
    operation_core_s: float
    """Processor time that this rank needs for one, while caches hold other things."""
    lone_operation_s: float
    """Seconds of one in which this rank has nobody to meet; where all are on one host, of one with these."""
    lone_operation_core_s: float
    """The same of processor time."""
    coding_s: float
    """Seconds of one of a codec's operations on a small tensor, besides its bytes."""
    shared_bytes_per_s: float
    """Rate of a large all-reduce among all ranks: its tensor's bytes over its seconds."""
    memory_bytes_per_s: float
    """Rate at which an update reads and writes."""
    row_bytes_per_s: float
    """The same, of rows of a table."""
    unevenness: float | None = None
    """How unevenly connections to another host share a link; none where this rank measured none."""
    incast_unevenness: float | None = None
    """How unevenly connections from all other hosts to one share its link; none where there are too few hosts."""


@dataclass(frozen=True)
class MeasuredNetwork:
    """A program in which ranks, on a host each, measure the ways to one another and tell a `NetworkReport`."""

    keys: Keys

    def __call__(self) -> None:
        world = current()
        assert world is not None
        torch.set_num_threads(1)
        report = _Measurement(world.context.collective, self.keys, world.reporter, world.store).run()
        tell(world, asdict(report))


def read(report: Mapping[str, Any]) -> NetworkReport:
    pairs = tuple(
        PairReport(**{**pair, "message": MessageCost(**pair["message"]), "exchange": ExchangeCost(**pair["exchange"])})
        for pair in report["pairs"]
    )
    return NetworkReport(**{**report, "pairs": pairs})


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of `count` players once, nobody twice in a round (the circle method of round-robin tournaments)."""
    players = [*range(count)] + [-1] * (count % 2)
    found = []
    for _ in range(len(players) - 1):
        pairs = zip(players[: len(players) // 2], reversed(players[len(players) // 2 :]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0])
        players = [players[0], players[-1], *players[1:-1]]
    return found


@final
class _Measurement:
    """One rank's part. Pairs that share no host are measured at the same time."""

    def __init__(self, collective: Collective, keys: Keys, reporter: Reporter, store: Store | None) -> None:
        """`store`: where ranks of several hosts meet."""
        self._collective, self._keys, self._reporter, self._store = collective, keys, reporter, store
        self._address = own_address()

    def run(self) -> NetworkReport:
        collective = self._collective
        echo = Echo(self._keys, host=self._address)
        try:
            places = collective.all_gather_object([self._address, echo.port, echo.endpoint])
            machines = collective.all_gather_object(Path("/proc/sys/kernel/random/boot_id").read_text())
            num_sharing = machines.count(machines[collective.rank])
            found: list[PairReport] = []
            for pairs in rounds(collective.size):
                collective.barrier()
                for first, second in pairs:
                    if collective.rank in (first, second):
                        other = first if collective.rank == second else second
                        message = self._messages(other)
                        swap = partial(self._swap_text, other)
                        cost = Exchanges(swap, self._keys, self._address, self._reporter, num_sharing).measure()
                    for source, destination in ((first, second), (second, first)):
                        if collective.rank == source:
                            found.append(self._measure(destination, *places[destination], message=message, cost=cost))
                        elif collective.rank == destination:
                            self._attend(source)
            unevenness, incast_unevenness = self._unevenness(places), self._incast_unevenness(places)
            packing_bytes_per_s = _packing_bytes_per_s(self._keys, echo.endpoint)
        finally:
            echo.close()
        small, large = torch.zeros(1024), torch.zeros(_MEMORY_BYTES // 4)

        def reduce(among: Collective) -> None:
            among.all_reduce(small, op="mean").wait()

        operation_s, operation_core_s = self._timed(partial(reduce, collective))
        lone_s, lone_core_s = operation_s, operation_core_s
        if not self._is_one_host(places):
            lone = connect_gloo(HashStore(), rank=0, size=1, address=self._address)
            lone_s, lone_core_s = self._timed(partial(reduce, lone))
            lone.close()
        return NetworkReport(
            self._address,
            collective.rank,
            tuple(found),
            packing_bytes_per_s,
            operation_s,
            operation_core_s,
            lone_s,
            lone_core_s,
            coding.operation_s(),
            large.nbytes / median_s(lambda: collective.all_reduce(large, op="mean").wait(), 2)
            if self._is_one_host(places)
            else 0.0,
            _memory_bytes_per_s(),
            _row_bytes_per_s(),
            unevenness,
            incast_unevenness,
        )

    def _timed(self, action: Callable[[], object]) -> tuple[float, float]:
        """Its seconds, and those of processors with caches that hold other things."""
        return mean_s(action, _NUM_PINGS), core_s(action, _NUM_PINGS)

    def _messages(self, other: int) -> MessageCost:
        """What small messages cost this rank and another one. Ranks of one host have one way to all others."""
        way = bursts.Way(self._collective, other)
        if self._store is None:
            return bursts.measure(way, [way] * bursts.BURST)
        first, second = sorted((self._collective.rank, other))
        store, is_first = PrefixStore(f"bursts-{first}-{second}", self._store), self._collective.rank == first
        with bursts.peers(store, partial(self._swap_text, other), address=self._address, is_first=is_first) as ways:
            return bursts.measure(way, ways)

    def _unevenness(self, places: Sequence[Sequence[Any]]) -> float | None:
        """Half the ranks measure connections to the other half, then the reverse; none where all are on one host."""
        collective = self._collective
        found = None
        for direction in (1, -1):
            collective.barrier()
            for source, destination in (pair[::direction] for pair in rounds(collective.size)[0]):
                if collective.rank == source and not self._is_one_host(places):
                    found = measure_unevenness(self._keys, places[destination][2], name=f"share-{source}")
        collective.barrier()
        return found

    def _incast_unevenness(self, places: Sequence[Sequence[Any]]) -> float | None:
        """How unevenly connections, one from each other host, share one host's link; a few hosts are tried in turn."""
        collective = self._collective
        if collective.size < _LEAST_INCAST or self._is_one_host(places):
            return None
        tries: list[list[int]] = []
        for attempt in range(NUM_TRIES):
            target = attempt % collective.size
            names = [f"incast-{attempt}-{collective.rank}"] if collective.rank != target else []
            with connected(self._keys, places[target][2], names) as callers:
                collective.barrier()
                counts = collective.all_gather_object(answered(callers))
            tries.append([count for each in counts for count in each])
        return unevenness_of(tries)

    def _is_one_host(self, places: Sequence[Sequence[object]]) -> bool:
        return len({place[0] for place in places}) == 1

    # --- the side that measures, and the one that answers, in step ------------------------------------------------

    def _measure(
        self, other: int, address: str, port: int, endpoint: str, *, message: MessageCost, cost: ExchangeCost
    ) -> PairReport:
        collective = self._collective
        latency_s = _plain_latency_s(address, port)
        num_pieces = int(self._stream(other, _FIRST_PIECES))
        bytes_per_s = self._stream(other, num_pieces)
        caller = Caller(self._keys, endpoint=endpoint, identity=f"worker-{collective.rank}")
        try:
            empty_s = median_s(lambda: _ask(caller, 1, b""), _NUM_PINGS)
            pushed_bytes_per_s = _ask(caller, num_pieces, bytes(FRAME_BYTES))
            piece_s = statistics.median(_single_piece_s(caller) for _ in range(_NUM_SINGLE_PIECES)) - empty_s
        finally:
            caller.close()
        self._tell(other, 0)  # all has been pushed
        return PairReport(
            source=collective.rank,
            destination=other,
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            pushed_bytes_per_s=pushed_bytes_per_s,
            piece_s=piece_s,
            message=message,
            exchange=cost,
        )

    def _attend(self, other: int) -> None:
        rate = self._take_stream(other, _FIRST_PIECES)
        num_pieces = int(min(max(_MIN_PIECES, _STREAM_S * rate / FRAME_BYTES), _MAX_PIECES))
        self._tell(other, num_pieces)
        self._tell(other, self._take_stream(other, num_pieces))
        self._hear(other)

    def _stream(self, other: int, num_pieces: int) -> float:
        """Send some pieces, and hear what the other says of them."""
        piece = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        for work in [self._collective.send(piece, destination=other) for _ in range(num_pieces)]:
            work.wait()
        return self._hear(other)

    def _take_stream(self, other: int, num_pieces: int) -> float:
        """Bytes per second from the end of the first piece, which what queues let pass at once has been spent on."""
        pieces = [torch.zeros(FRAME_BYTES, dtype=torch.uint8) for _ in range(num_pieces)]
        works = [self._collective.recv(piece, source=other) for piece in pieces]
        works[0].wait()
        began_s = time.perf_counter()
        for work in works[1:]:
            work.wait()
        return (num_pieces - 1) * FRAME_BYTES / max(time.perf_counter() - began_s, 1e-9)

    def _tell(self, other: int, number: float) -> None:
        self._collective.send(torch.tensor([number], dtype=torch.float64), destination=other).wait()

    def _hear(self, other: int) -> float:
        number: Tensor = torch.zeros(1, dtype=torch.float64)
        self._collective.recv(number, source=other).wait()
        return float(number)

    def _swap_text(self, other: int, text: str) -> str:
        mine, theirs = torch.zeros(2, _TEXT_BYTES, dtype=torch.uint8)
        raw = text.encode()
        mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        exchange(self._collective, mine, destination=other, incoming=theirs, source=other)
        return bytes(theirs.tolist()).rstrip(b"\0").decode()


def _ask(caller: Caller, count: int, piece: bytes) -> float:
    """Send so many requests, with a piece each unless it is empty; bytes per second from the first answer on."""
    message = Message(Kind.EXCHANGE, EPOCH, payload=[piece] if piece else ())
    for _ in range(count):
        caller.send(message)
    began_s = time.perf_counter()
    for number in range(count):
        await_answer(caller)
        if number == 0:
            began_s = time.perf_counter()
    return (count - 1) * len(piece) / max(time.perf_counter() - began_s, 1e-9)


def _single_piece_s(caller: Caller) -> float:
    """Seconds until a piece that is pushed after a silence is answered."""
    time.sleep(_SILENCE_S)
    began_s = time.perf_counter()
    _ask(caller, 1, bytes(FRAME_BYTES))
    return time.perf_counter() - began_s


def _plain_latency_s(address: str, port: int) -> float:
    ping = bytes(PING_BYTES)
    with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def there_and_back() -> None:
            connection.sendall(ping)
            connection.recv(PING_BYTES)

        return median_s(there_and_back, _NUM_PINGS) / 2


def _packing_bytes_per_s(keys: Keys, endpoint: str) -> float:
    """The rate from this process to itself, so that no link's rate matters: every piece is packed and taken in
    again."""
    caller = Caller(keys, endpoint=endpoint, identity="packer")
    try:
        _ask(caller, _FIRST_PIECES, bytes(FRAME_BYTES))
        began_s = time.process_time()
        _ask(caller, _MAX_PIECES, bytes(FRAME_BYTES))
        return 2 * _MAX_PIECES * FRAME_BYTES / max(time.process_time() - began_s, 1e-9)
    finally:
        caller.close()


def _memory_bytes_per_s() -> float:
    """Rate at which updates in pieces, as servers make them, read parameters and gradients and write parameters."""
    parameters, gradients = torch.zeros(_MEMORY_BYTES // 4), torch.zeros(_MEMORY_BYTES // 4)
    pieces = list(zip(parameters.split(FRAME_BYTES // 4), gradients.split(FRAME_BYTES // 4), strict=True))

    def update() -> None:
        for parameter, gradient in pieces:
            parameter.add_(gradient, alpha=-0.1)

    return 3 * parameters.nbytes / median_s(update, _NUM_UPDATES)


def _row_bytes_per_s() -> float:
    """Rate at which a server's update reads and writes rows, and what their optimizer keeps. Keys come in no order, and
    caches hold other things, as after a training step and its messages."""
    spec = TableSpec("rows", _NUM_ROWS, _ROW_WIDTH, Adagrad(lr=0.1))
    table, keys = Table(spec), torch.randperm(_NUM_ROWS)
    table.update(RowGradients(keys, spec.empty_rows(_NUM_ROWS).fill_(1.0)))
    batches = cycle(RowGradients(some, spec.empty_rows(len(some)).fill_(1.0)) for some in keys.split(_ROWS_A_BATCH))
    update_s = median_s(lambda: table.update(next(batches)), _NUM_ROW_UPDATES, before=CacheEmptier())
    return _ROWS_A_BATCH * table.update_bytes / update_s
