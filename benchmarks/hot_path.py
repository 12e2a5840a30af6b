"""What a strategy costs each step: windows of the same loop with and without Paceline, in the same processes.

Every worker process holds one model for each contender and trains windows of them in turn, many times, so that a change
of the machine's mood meets all of them. `plain` is PyTorch alone; `lockstep` adds a meeting of all workers after each
step and nothing else; `-unchecked` leaves out all that watches over the script (docs/script.md); `elastic` is
all-reduce with `--elastic`, in which nobody dies. Ratios are of windows within a round: their median, and the
quartiles.

    python benchmarks/hot_path.py --model convnet --batch-size 100
    python benchmarks/hot_path.py --model resnet18 --batch-size 4 --steps 6
    python benchmarks/hot_path.py --only plain all-reduce all-reduce-unchecked ps-bsp ps-bsp-unchecked --rounds 100
    python benchmarks/hot_path.py --only plain all-reduce ps-bsp ps-asp --checks
    python benchmarks/hot_path.py --only plain single --workers 1
    python benchmarks/hot_path.py --only plain lockstep single all-reduce ps-bsp --model resnet18 --device cuda
    python benchmarks/hot_path.py --only plain lockstep ps-bsp --model resnet18 --batch-size 4 --steps 4 --servers 2
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from peers.workload import make_model, make_optimizer, share_cores, train_step
from report import tell
from rich.table import Table
from throughput import FixedBatches, whole
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
from paceline.strategies import all_reduce, build, combining, same_steps, serving
from paceline.strategies.base import Context, Strategy
from paceline.strategies.combining import Combining
from paceline.strategies.gradient_reads import GradientReads
from paceline.strategies.held_state import HeldState
from paceline.strategies.looks import Window
from paceline.strategies.server_owned import ServerOwned
from paceline.strategies.untouched import Untouched
from paceline.training import agreement, divisors
from paceline.training.clock import TrainingClock
from paceline.training.given import told_apart
from paceline.training.handouts import Handouts
from paceline.training.same_gradients import SameGradients
from paceline.training.session import Session

PLAIN = ("plain", "lockstep")
UNCHECKED = "-unchecked"
STRATEGIES = ("single", "all-reduce", "elastic", "ps-bsp", "ps-asp")
CONTENDERS = (*PLAIN, *STRATEGIES, *(f"{name}{UNCHECKED}" for name in STRATEGIES))
COMPARISONS = (
    ("lockstep", "plain"),
    ("single", "plain"),
    ("all-reduce", "lockstep"),
    ("all-reduce", "plain"),
    ("elastic", "all-reduce"),
    ("ps-bsp", "lockstep"),
    ("ps-bsp", "plain"),
    ("ps-asp", "plain"),
    *((name, f"{name}{UNCHECKED}") for name in STRATEGIES),
)
DEADLINE_S = 60.0
OPTIMIZERS = sys.modules[torch.optim.Optimizer.__module__]
"""Which torch.optim does not show."""
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


def nothing(*_: Any, **__: Any) -> None:
    """In the place of a check."""


CHECKS: tuple[tuple[Any, str, Any], ...] = (
    (all_reduce, "require_same_parameters", nothing),
    *((serving, f"require_{what}", nothing) for what in ("all_parameters", "no_hooks", "same_attributes")),
    (HeldState, "require_untouched", nothing),
    (ServerOwned, "require_untouched", nothing),
    (ServerOwned, "require_in_place", nothing),
    *((Untouched, name, nothing) for name in ("accept", "accept_values")),
    *((Window, name, lambda self: b"") for name in ("read", "move_on")),
    (Combining, "_versions", lambda self: []),
    (combining, "digest", lambda tensors: ""),
    *((GradientReads, name, nothing) for name in ("begin", "end")),
    (same_steps, "digest", lambda tensors: ""),
    (serving, "next_look", lambda step: step + 1),
    *((SameGradients, name, nothing) for name in ("begin", "hand_out", "_take", "close")),
    (divisors, "_divisors_in", lambda roots: []),
    (Handouts, "_require_all_samples", nothing),
    (agreement, "digest", lambda tensors: ""),
    (agreement, "settings_of", lambda optimizer: ()),
)
"""What looks at every step, or in pauses, whether the script does what all workers can: each with what stands in."""


@contextmanager
def unchecked() -> Iterator[None]:
    """Nobody looks meanwhile."""
    with ExitStack() as stack:
        for home, name, instead in CHECKS:
            stack.enter_context(patch.object(home, name, instead))
        stack.enter_context(patch.object(OPTIMIZERS, "_global_optimizer_pre_hooks", OrderedDict()))
        yield


class Spent:
    """The core's time that checks take, in a run that makes them; what other programs take is not in it."""

    def __init__(self) -> None:
        self.total_s, self._depth = 0.0, 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count meanwhile. With each call it also counts half a call of the clock, about 0.3 us."""
        with ExitStack() as stack:
            for home, name, _ in CHECKS:
                stack.enter_context(patch.object(home, name, self._timed(getattr(home, name))))
            hooks = {key: self._timed(hook) for key, hook in OPTIMIZERS._global_optimizer_pre_hooks.items()}
            stack.enter_context(patch.object(OPTIMIZERS, "_global_optimizer_pre_hooks", OrderedDict(hooks)))
            yield

    def _timed(self, check: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            if self._depth:
                return check(*arguments, **settings)
            self._depth = 1
            time.thread_time()  # what it takes to find the clock after a backward pass is no check's
            start_s = time.thread_time()
            try:
                return check(*arguments, **settings)
            finally:
                self.total_s += time.thread_time() - start_s
                self._depth = 0

        return call


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
        model = make_model(self.model_name).to(self.device)
        optimizer: Any = make_optimizer(model)
        data = FixedBatches(self.batch_size, seed=self.rank)
        loader: Any = DataLoader(data, batch_size=self.batch_size, collate_fn=whole)
        optimizer.differs_by_rank = name in PLAIN
        if name not in PLAIN:
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


def work(
    rank: int,
    size: int,
    line: Connection,
    done: Any,
    model: str,
    batch_size: int,
    servers: Mapping[str, Servers],
    names: Sequence[str],
    rounds: int,
    steps: int,
    counts_checks: bool,
    device: str,
) -> None:
    """A worker process: windows of `steps` steps of each contender, in turn; sends the seconds of each round. If it
    counts checks, these are the core's: of plain steps, and of the others' checks."""
    share_cores(size)
    worker = Worker(rank, size, line, done, model, batch_size, servers, torch.device(device))
    contenders = {name: worker.step_of(name) for name in names}
    line.send("ready")
    for number in range(rounds + 1):  # the first is for warming up
        order = [*names[number % len(names) :], *names[: number % len(names)]]
        spent = {name: Spent() for name in names}
        took_s: dict[str, float] = {}
        for name in order:
            step = contenders[name]
            counts = spent[name].counted() if counts_checks else nullcontext()
            with worker.turn_of(name), unchecked() if name.endswith(UNCHECKED) else counts:
                step()  # brings the contender's memory into caches
                worker.finish()
                worker.meet()
                spent[name].total_s = 0.0
                start_s, core_start_s = time.perf_counter(), time.thread_time()
                for _ in range(steps):
                    step()
                worker.finish()
                took_s[name] = (time.perf_counter() - start_s) / steps
                if counts_checks:
                    is_plain = name in PLAIN
                    core_s = time.thread_time() - core_start_s if is_plain else spent[name].total_s
                    took_s[name] = core_s / steps
            worker.meet()
        line.send(took_s)


def measure(
    *,
    model: str,
    batch_size: int,
    workers: int,
    servers: int,
    names: Sequence[str],
    rounds: int,
    steps: int,
    counts_checks: bool,
    device: str,
) -> list[dict[str, float]]:
    """Seconds a step of each contender, one dictionary a round: the mean over workers."""
    context = multiprocessing.get_context("spawn")
    done = context.RawArray("q", workers)
    groups = {name: Servers(servers) for name in names if name.startswith("ps-")}
    lines, processes = [], []
    for rank in range(workers):
        mine, theirs = context.Pipe()
        arguments = (
            rank,
            workers,
            theirs,
            done,
            model,
            batch_size,
            groups,
            names,
            rounds,
            steps,
            counts_checks,
            device,
        )
        processes.append(context.Process(target=work, args=arguments, daemon=True))
        lines.append(mine)
    for process in processes:
        process.start()
    for _ in range(sum(name.removesuffix(UNCHECKED) not in (*PLAIN, "single") for name in names)):
        addresses = [line.recv() for line in lines]
        for line in lines:
            line.send(addresses)
    for line in lines:
        assert line.recv() == "ready"
    found = [[line.recv() for line in lines] for _ in range(rounds + 1)][1:]
    for process in processes:
        process.join()
    return [{name: statistics.mean(took[name] for took in everyone) for name in names} for everyone in found]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    lower, middle, upper = statistics.quantiles(values, n=4)
    return lower, middle, upper


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Between which of the values the median is in 95 of 100 such samples: a binomial's bounds, nearly a normal's."""
    ordered, spread = sorted(values), 1.96 * math.sqrt(len(values)) / 2
    below = max(0, math.floor(len(values) / 2 - spread))
    return ordered[below], ordered[len(values) - 1 - below]


def table_of(found: Sequence[dict[str, float]], title: str) -> Table:
    columns = ("contender", "us a step", "beside", "of its rate", "quartiles", "us more", "its 95 % interval")
    table = Table(*columns, title=title)
    names = list(found[0])
    for name in names:
        took = statistics.median(one[name] for one in found)
        beside = [other for mine, other in COMPARISONS if mine == name and other in names] or ["-"]
        for other in beside:
            if other == "-":
                table.add_row(name, f"{took * 1e6:,.0f}", *"-----")
                continue
            lower, middle, upper = quartiles([one[other] / one[name] for one in found])
            more = [(one[name] - one[other]) * 1e6 for one in found]
            low, high = interval_of_median(more)
            ratios = f"{middle:.3f}", f"{lower:.3f} to {upper:.3f}"
            difference = f"{statistics.median(more):,.0f}", f"{low:,.0f} to {high:,.0f}"
            table.add_row(name, f"{took * 1e6:,.0f}", other, *ratios, *difference)
    return table


def checks_of(found: Sequence[dict[str, float]], title: str) -> Table:
    """Of the core's time that a plain step takes, what checks take beside it."""
    table = Table("contender", "us in checks a step", "of a plain step, %", "its 95 % interval", title=title)
    for name in found[0]:
        if name not in PLAIN:
            shares = [100 * one[name] / one["plain"] for one in found]
            low, high = interval_of_median(shares)
            took = statistics.median(one[name] for one in found) * 1e6
            table.add_row(name, f"{took:,.0f}", f"{statistics.median(shares):.2f}", f"{low:.2f} to {high:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--batch-size", type=int, default=100, help="samples a worker and step")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=60, help="steps of a window")
    parser.add_argument("--servers", type=int, default=1, help="parameter servers of the ps strategies")
    parser.add_argument("--checks", action="store_true", help="the core's time of plain steps, and of others' checks")
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=(*PLAIN, *STRATEGIES))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all workers share the first GPU"
    )
    args = parser.parse_args()
    names = [name for name in CONTENDERS if name in args.only]
    workload = {name: getattr(args, name) for name in ("model", "batch_size", "workers", "servers")}
    windows = {"rounds": args.rounds, "steps": args.steps}
    found = measure(**workload, **windows, names=names, counts_checks=args.checks, device=args.device)
    on = f"{args.model}, batch {args.batch_size}, {args.workers} workers on {args.device}"
    title = f"{on}, {args.rounds} rounds of {args.steps} steps"
    table = checks_of(found, title) if args.checks else table_of(found, title)
    tell([table], {"workload": workload, "seconds_a_step": found})


if __name__ == "__main__":
    main()
