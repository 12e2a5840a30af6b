"""The fast engine of these tests: a run's processes are forked on this machine, without Ray.

Workers are real processes with shared memory among them; servers are real services behind real sockets, in threads
of this process. `run` has the arguments of `paceline.run`, and its worlds are made of the same parts.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective, Store
from paceline.comm.process_group.collective import connect_nccl
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import ServerAddress, connect_servers
from paceline.comm.shared_memory.block import BlockAddress
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.comm.socket_mailbox import SocketMailbox
from paceline.comm.wire import Keys
from paceline.config import RunConfig
from paceline.engines.scripting import run_program
from paceline.engines.world import World, enter
from paceline.errors import RunFailed
from paceline.layout import Layout
from paceline.membership import Membership
from paceline.records import Record, RecordWriter, Reporter
from paceline.running.result import Result
from paceline.server.ranges import KeyRange
from paceline.server.spec import OptimizerSpec
from paceline.strategies import build
from paceline.strategies.base import Context, Strategy
from tests.conformance.settings import config_of
from tests.forks import FORKS

EPOCH = 1
GATHER_S = 5.0
PATIENCE_S = 100.0
SHORT_S = 0.25
STOP_FILE = "stop"
"""A script that makes this file in its result directory asks the run to end, as a user's Ctrl-C does."""


def run(
    program: Callable[[], Any],
    *,
    strategy: str | Strategy,
    workers: int,
    out: Path,
    options: Mapping[str, Any] | None = None,
    resume: Path | None = None,
    servers_are_local: bool | Collection[int] = True,
    **settings: Any,
) -> Result:
    """As `paceline.run`, for functions that can be pickled. On `device="cuda"` workers share a GPU and meet over NCCL.

    Args:
        servers_are_local: false: tensors go through the servers' sockets, as from another host; ranks: of all others.

    Raises:
        RunFailed: a worker raised; the message holds every failed worker's error and traceback.
    """
    plan = build(strategy, options) if isinstance(strategy, str) else strategy
    plan.check(num_workers=workers)
    config = config_of(**settings)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = (resume / FILE_NAME).read_bytes() if resume is not None else None
    with _servers(plan) as (keys, services, records):
        processes = [_Process(program, plan, config, rank, workers, out, checkpoint) for rank in range(workers)]
        try:
            addresses = [process.receive() for process in processes]
            for rank, process in enumerate(processes):
                is_local = servers_are_local if isinstance(servers_are_local, bool) else rank in servers_are_local
                servers = [ServerAddress(service.endpoint, service.bell if is_local else None) for service in services]
                process.connection.send((addresses, keys, servers))
            failures = _watch(processes, services, plan, config, records)
        finally:
            for process in processes:
                process.end()
        _write(out, records)
    if failures:
        raise RunFailed("\n".join(failures))
    return Result(out)


def wait_until(is_so: Callable[[], bool]) -> None:
    """A script waits for what other workers do, however long that takes.

    Raises:
        AssertionError: they never did it.
    """
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s, "waited for other workers in vain"
        time.sleep(0.002)


@contextlib.contextmanager
def _servers(plan: Strategy) -> Iterator[tuple[Keys, list[ParameterService], list[Record]]]:
    keys, records = Keys.generate(), list[Record]()
    services = [
        ParameterService(keys, host="127.0.0.1", index=index, epoch=EPOCH, reporter=_ListReporter(records, Path()))
        for index in range(plan.traits.num_servers)
    ]
    threads = [threading.Thread(target=service.serve) for service in services]
    for thread in threads:
        thread.start()
    try:
        yield keys, services, records
    finally:
        for service in services:
            service.stop()
        for thread in threads:
            thread.join()


def _watch(
    processes: list[_Process],
    services: Sequence[ParameterService],
    plan: Strategy,
    config: RunConfig,
    records: list[Record],
) -> list[str]:
    """Serve the workers until all have ended, or one has failed and the others had time to say so too."""
    failures: list[str] = []
    running = {process.connection: process for process in processes}
    give_up_s = time.monotonic() + 2 * config.deadline_s
    while running and time.monotonic() < give_up_s:
        for connection in wait(list(running), timeout=0.05):
            process = running[connection]  # type: ignore[index]
            kind, *content = process.receive()
            if kind == "configure":
                number, layout, spec, ranges = content
                members = Membership.first(len(processes))
                for service, pieces in zip(services, ranges, strict=True):
                    service.configure(
                        plan.server_spec(
                            layout, pieces, spec, members=members, max_updates=config.max_steps, number=number
                        )
                    )
                process.connection.send("configured")
                continue
            del running[connection]  # type: ignore[arg-type]
            records.extend(content[0])
            if content[1] is not None:
                failures.append(f"worker {process.rank}: {content[1]}")
                give_up_s = min(give_up_s, time.monotonic() + GATHER_S)
    if running and not failures:
        failures.append(f"workers {[process.rank for process in running.values()]} did not end")
    return failures


def _write(directory: Path, records: list[Record]) -> None:
    writer = RecordWriter(directory)
    writer.write(records)
    writer.close()


@final
class _Process:
    """One worker's process, seen from here."""

    def __init__(
        self,
        program: Callable[[], Any],
        plan: Strategy,
        config: RunConfig,
        rank: int,
        size: int,
        out: Path,
        checkpoint: bytes | None,
    ) -> None:
        self.rank = rank
        self.connection, theirs = FORKS.Pipe()
        arguments = (theirs, program, plan, config, rank, size, out, checkpoint)
        self._process = FORKS.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            return ("ended", [], "its process died")

    def end(self) -> None:
        self.connection.close()
        self._process.join(0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@final
class _ListReporter(Reporter):
    """Keeps records until the end. Checkpoints are encoded beside training, as in real runs."""

    writes_beside = True

    def __init__(self, records: list[Record], directory: Path) -> None:
        self._records, self._directory = records, directory

    def emit(self, record: Record) -> None:
        self._records.append(record)

    def save(self, name: str, content: bytes | memoryview) -> None:
        (self._directory / name).write_bytes(content)

    def stop_requested(self) -> bool:
        return (self._directory / STOP_FILE).exists()


def _work(
    connection: Connection,
    program: Callable[[], Any],
    plan: Strategy,
    config: RunConfig,
    rank: int,
    size: int,
    out: Path,
    checkpoint: bytes | None,
) -> None:
    """What a worker's process does."""
    torch.set_num_threads(1)
    control = SharedMemoryCollective.prepare()
    connection.send(control.address)
    addresses, keys, servers = connection.recv()
    records: list[Record] = []
    error: str | None = None
    world: World | None = None
    ends: list[Any] = []
    try:
        device = torch.device("cuda", 0) if config.device == "cuda" else torch.device("cpu")
        if device.type == "cuda" and size > 1:
            collective = _over_nccl(rank, size, out, device, config.deadline_s)
        else:
            collective = _over_shared_memory(rank, size, addresses, control, config.deadline_s)
        ends.append(collective)

        def store_of(number: int) -> Store:
            store = connect_servers(
                keys,
                servers=servers,
                collective=collective,
                configure=partial(_configure, connection, number),
                epoch=EPOCH,
                deadline_s=config.deadline_s,
                number=number,
            )
            ends.append(store)
            return store

        def connect_mailbox(collective: Collective, membership: Membership) -> SocketMailbox:
            mailbox = SocketMailbox(
                keys, host="127.0.0.1", collective=collective, epoch=membership.epoch, deadline_s=config.deadline_s
            )
            ends.append(mailbox)
            return mailbox

        context = Context(
            rank,
            Membership.first(size),
            rank,
            size,
            device,
            collective,
            store=store_of(0) if servers else None,
            store_beside=store_of if servers else None,
            connect_mailbox=connect_mailbox,
        )
        restored = Checkpoint.decode(checkpoint, where="the checkpoint") if checkpoint is not None else None
        world = World(context, plan, config, _ListReporter(records, out), restored)
        enter(world)
        run_program(program)
        for finish in world.at_end:
            finish()
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}"
        connection.send(("ended", records, error))  # before others can find that it has left, and say that
    if world is not None:
        world.release()
    for end in reversed(ends):
        with contextlib.suppress(Exception):
            end.close()
    if error is None:
        connection.send(("ended", records, error))


def _over_nccl(rank: int, size: int, out: Path, device: torch.device, deadline_s: float) -> Collective:
    """NCCL takes two ranks with one GPU if they seem to be on two hosts."""
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    store = dist.FileStore(str(out / "meeting-point"), size)
    return connect_nccl(store, rank=rank, size=size, device=device, address="127.0.0.1", deadline_s=deadline_s)


def _over_shared_memory(
    rank: int, size: int, addresses: Sequence[BlockAddress], control: Any, deadline_s: float
) -> Collective:
    if size == 1:
        return AloneCollective()
    return SharedMemoryCollective(rank=rank, addresses=addresses, control=control, deadline_s=deadline_s)


def _configure(
    connection: Connection, number: int, layout: Layout, spec: OptimizerSpec, ranges: Sequence[KeyRange]
) -> None:
    connection.send(("configure", number, layout, spec, list(ranges)))
    connection.recv()
