"""The contenders of hot_path.py: what makes one step of each in a worker's process, and their parameter servers."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from peers.workload import make_model, make_optimizer, train_step
from throughput import FixedBatches, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import ServerAddress, connect_servers
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.comm.wire import Keys
from paceline.config import RunConfig
from paceline.elastic import Elastic, Member
from paceline.layout import Layout
from paceline.membership import Membership
from paceline.messages import Raw
from paceline.records import Record, Reporter
from paceline.server.ranges import KeyRange
from paceline.server.spec import OptimizerSpec
from paceline.strategies import build
from paceline.strategies.base import Context, Strategy
from paceline.training.clock import TrainingClock
from paceline.training.given import told_apart
from paceline.training.session import Session

PLAIN = ("plain", "lockstep")
UNCHECKED = "-unchecked"
STRATEGIES = ("single", "all-reduce", "elastic", "ps-bsp", "ps-asp")
DDP = "ddp-gloo"
MEETING_BY_ADDRESS = (DDP, *STRATEGIES[1:])
CONTENDERS = (*PLAIN, DDP, *STRATEGIES, *(f"{name}{UNCHECKED}" for name in STRATEGIES))
DEADLINE_S = 60.0
Step = Callable[[], None]


class Kept(Reporter):
    """Takes records as a run's control line does, which packs and sends them in a thread of its own."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        self.records.append(record)

    def save(self, name: str, content: bytes | memoryview) -> None:
        pass

    def stop_requested(self) -> bool:
        return False


class Servers:
    """The processes of one contender's parameter servers, as the process that starts them and the workers see them."""

    def __init__(self, count: int) -> None:
        self.keys = Keys.generate()
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
        self.lines = [mine for mine, _ in pipes]
        for index, (_, theirs) in enumerate(pipes):
            context.Process(target=serve, args=(theirs, self.keys, index), daemon=True).start()
        self.addresses: list[ServerAddress] = [line.recv() for line in self.lines]

    def configure(
        self, strategy: Strategy, size: int, layout: Layout, spec: OptimizerSpec, ranges: Sequence[KeyRange]
    ) -> None:
        for line, pieces in zip(self.lines, ranges, strict=True):
            members = Membership.first(size)
            line.send(strategy.server_spec(layout, pieces, spec, members=members, max_updates=None, number=0))
            line.recv()


def serve(line: Connection, keys: Keys, index: int) -> None:
    """One server's process, which ends with the one that started it."""
    torch.set_num_threads(1)
    epoch = Membership.first(1).epoch
    service = ParameterService(keys, host="127.0.0.1", index=index, epoch=epoch, reporter=Kept())
    line.send(ServerAddress(service.endpoint, service.bell))
    service.configure(line.recv())
    line.send("configured")
    service.serve()


class Worker:
    """One process's contenders: what makes one step of each."""

    def __init__(
        self,
        rank: int,
        size: int,
        line: Connection,
        done: Any,
        model: str,
        batch_size: int,
        servers: Mapping[str, Servers],
        device: torch.device,
    ) -> None:
        self.device = device
        self.rank, self.size, self.line, self.done, self.servers = rank, size, line, done, servers
        self.model_name, self.batch_size = model, batch_size
        self.meetings = 0
        self.clocks: dict[str, TrainingClock] = {}

    def step_of(self, name: str) -> Step:
        model: nn.Module = make_model(self.model_name).to(self.device)
        optimizer: Any = make_optimizer(model)
        data = FixedBatches(self.batch_size, seed=self.rank)
        loader: Any = DataLoader(data, batch_size=self.batch_size, collate_fn=whole)
        optimizer.differs_by_rank = name in (*PLAIN, DDP)
        if name == DDP:
            model = self._parallel(model)
        elif name not in PLAIN:
            session = self._session(name)
            self.clocks[name] = session.run.clock
            [loader] = session.prepare(told_apart((model, optimizer, loader), {})).values()
        batches = _repeated(loader, self.device)

        def step() -> None:
            train_step(model, optimizer, next(batches))

        return self._meeting_after(step) if name == "lockstep" else step

    @contextmanager
    def turn_of(self, name: str) -> Iterator[None]:
        """Others' turns are not on a contender's clock, by which it knows how fast it is and so how often to look."""
        clock = self.clocks.get(name)
        if clock is not None and clock.now_s:
            clock.resume()
        yield
        if clock is not None:
            clock.pause()

    def finish(self) -> None:
        """What was given to the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def meet(self) -> None:
        """All workers have come here."""
        self.meetings += 1
        self.done[self.rank] = self.meetings
        while min(self.done) < self.meetings:
            os.sched_yield()

    def _meeting_after(self, step: Step) -> Step:
        def both() -> None:
            step()
            self.meet()

        return both

    def _parallel(self, model: nn.Module) -> nn.Module:
        """PyTorch's own, over gloo."""
        name = f"hot-path-{os.getpid()}-{time.time_ns()}"  # the store makes the file, and removes it
        self.line.send(Path(tempfile.gettempdir(), name).as_uri())
        meeting_point = self.line.recv()[0]
        dist.init_process_group("gloo", init_method=meeting_point, rank=self.rank, world_size=self.size)
        return DistributedDataParallel(model)

    def _session(self, contender: str) -> Session:
        name = contender.removesuffix(UNCHECKED)
        alone = name == "single"
        size, rank = (1, 0) if alone else (self.size, self.rank)
        collective: Collective = AloneCollective() if alone else self._shared_memory()
        servers, members = self.servers.get(contender), Membership.first(size)
        is_elastic = name == "elastic"
        options = {"servers": len(servers.addresses)} if servers is not None else {}
        strategy = build("all-reduce" if is_elastic else name, options)
        store = None
        if servers is not None:
            store = connect_servers(
                servers.keys,
                servers=servers.addresses,
                collective=collective,
                configure=partial(servers.configure, strategy, size),
                epoch=members.epoch,
                deadline_s=DEADLINE_S,
            )
        context = Context(rank, members, rank, size, self.device, collective, store)
        config = RunConfig(seed=0)
        if is_elastic:
            context = replace(context, reform=_NobodyComesOrGoes())
            config = RunConfig(seed=0, elastic=Elastic(at_least=1, at_most=size))
        return Session(context, strategy, config, Kept())

    def _shared_memory(self) -> Collective:
        control = SharedMemoryCollective.prepare()
        self.line.send(control.address)
        return SharedMemoryCollective(rank=self.rank, addresses=self.line.recv(), control=control)


class _NobodyComesOrGoes:
    joins = is_asked_to_leave = False
    asked_to_give: tuple[int, ...] = ()

    def __call__(self, member: Member, last_result: Callable[[], Sequence[Raw]]) -> NoReturn:
        raise AssertionError(f"rank {member.rank} has lost another one")

    def give(self, write: Callable[[Path], None], *, member: Member, to: tuple[int, ...]) -> NoReturn:
        raise AssertionError(to)

    def take(self, *, rank: int, epoch: int) -> NoReturn:
        raise AssertionError(rank)

    def leave(self, rank: int) -> NoReturn:
        raise AssertionError(rank)


def _repeated(loader: Any, device: torch.device) -> Iterator[Any]:
    while True:
        for x, y in loader:
            yield x.to(device), y.to(device)
