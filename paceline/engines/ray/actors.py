"""The processes of a run, as Ray actors: workers that run the script, servers that hold the model."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import ray
import torch
from torch.distributed import TCPStore

from paceline.checkpoint import Checkpoint
from paceline.comm.connecting import connect
from paceline.comm.servers.line import BellAddress
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import ServerAddress, connect_servers
from paceline.config import RunConfig
from paceline.engines.ray.control import ControlLine, LauncherAddress
from paceline.engines.ray.liveness import RUN_VARIABLE, bind_forks_to_this_process
from paceline.engines.ray.nodes import own_address, own_node_id
from paceline.engines.ray.output import captured
from paceline.engines.scripting import Outcome, Program, outcome_of, run_program
from paceline.engines.threads import share_of
from paceline.engines.world import World, enter
from paceline.layout import Layout
from paceline.membership import Membership
from paceline.memory import keep_freed_memory
from paceline.server.ranges import KeyRange
from paceline.server.spec import OptimizerSpec, ServerSpec
from paceline.strategies.base import Context, Strategy

_STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker tells of itself before the world is known."""

    pid: int
    node_id: str
    address: str
    store_port: int
    """Where this worker's torch.distributed store listens, should it become rank 0."""
    num_devices: int
    num_cores: int


@dataclass(frozen=True)
class ServerInfo:
    """What a server tells of itself."""

    pid: int
    node_id: str
    endpoint: str
    bell: BellAddress


@dataclass(frozen=True)
class WorldSpec:
    """The whole world, as every worker is told it. Ranks run host by host."""

    epoch: int
    workers: tuple[WorkerInfo, ...]
    servers: tuple[ServerInfo, ...]
    strategy: Strategy
    config: RunConfig
    uses_cuda: bool
    is_resumed: bool

    @property
    def membership(self) -> Membership:
        return Membership(self.epoch, tuple(range(self.size)))

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def num_hosts(self) -> int:
        return len({worker.node_id for worker in self.workers})

    def num_threads(self, rank: int) -> int:
        """A worker computes with its share of its host's cores.

        Servers are not counted: under bsp they compute while workers wait, else they take what their updates need.
        """
        worker = self.workers[rank]
        return share_of(worker.num_cores, len(self.ranks_on(worker.node_id)))

    def ranks_on(self, node_id: str) -> list[int]:
        return [rank for rank, worker in enumerate(self.workers) if worker.node_id == node_id]


@final
class WorkerActor:
    """One worker. `hello`, then `run`, which returns how the program ended instead of raising."""

    def __init__(self) -> None:
        self._address = own_address()
        self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)

    def hello(self) -> WorkerInfo:
        return WorkerInfo(
            os.getpid(),
            own_node_id(),
            self._address,
            self._store.port,
            torch.cuda.device_count(),
            len(os.sched_getaffinity(0)),
        )

    def run(
        self, spec: WorldSpec, rank: int, program: Program, launcher: LauncherAddress, servers: list[Any]
    ) -> Outcome:
        # A Ctrl-C in the launcher's terminal reaches the whole process group; the launcher alone acts on it.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ[RUN_VARIABLE] = launcher.run
        bind_forks_to_this_process()
        ends: list[Any] = []
        world: World | None = None

        def progress() -> int:
            return world.progress() if world is not None else 0

        def abort(reason: str) -> None:
            for end in ends:
                end.abort(reason)

        line = ControlLine(launcher, identity=f"worker-{rank}", progress=progress, on_abort=abort)
        try:
            world = self._enter_world(spec, rank, launcher, line, servers, ends)
            with captured(line.say):
                run_program(program)
                for finish in world.at_end:
                    finish()
            return Outcome(num_steps=progress())
        except BaseException as error:
            return outcome_of(error, num_steps=progress())
        finally:
            line.close()
            for end in reversed(ends):
                with contextlib.suppress(Exception):
                    end.close()
            enter(None)

    def _enter_world(
        self,
        spec: WorldSpec,
        rank: int,
        launcher: LauncherAddress,
        line: ControlLine,
        servers: list[Any],
        ends: list[Any],
    ) -> World:
        me = spec.workers[rank]
        local_ranks = spec.ranks_on(me.node_id)
        torch.set_num_threads(spec.num_threads(rank))
        keep_freed_memory()
        device = _device_of(me, local_ranks.index(rank)) if spec.uses_cuda else torch.device("cpu")
        first = spec.workers[0]
        meeting_place = (
            self._store
            if rank == 0
            else TCPStore(first.address, first.store_port, is_master=False, timeout=_STORE_TIMEOUT)
        )
        collective = connect(meeting_place, rank=rank, size=spec.size, device=device, deadline_s=spec.config.deadline_s)
        ends.append(collective)
        store = None
        if spec.servers:
            store = connect_servers(
                launcher.keys,
                servers=[ServerAddress(s.endpoint, s.bell if s.node_id == me.node_id else None) for s in spec.servers],
                collective=collective,
                configure=lambda layout, optimizer, ranges: _configure(spec, servers, layout, optimizer, ranges),
                epoch=spec.epoch,
                deadline_s=spec.config.deadline_s,
            )
            ends.append(store)
        context = Context(
            rank=rank,
            membership=spec.membership,
            local_rank=local_ranks.index(rank),
            local_size=len(local_ranks),
            device=device,
            collective=collective,
            store=store,
        )
        restored = Checkpoint.decode(line.load_checkpoint(), where="the checkpoint") if spec.is_resumed else None
        world = World(context, spec.strategy, spec.config, line, restored)
        enter(world)
        return world


@final
class ServerActor:
    """One parameter server. `serve` runs in one thread until `stop`, called in another."""

    def __init__(self, launcher: LauncherAddress, index: int) -> None:
        torch.set_num_threads(1)
        self._service: ParameterService | None = None
        self._line = ControlLine(launcher, identity=f"server-{index}", progress=self._iteration, on_abort=self._abort)
        self._service = ParameterService(
            launcher.keys, host=own_address(), index=index, epoch=launcher.epoch, reporter=self._line
        )

    def hello(self) -> ServerInfo:
        return ServerInfo(os.getpid(), own_node_id(), self._built.endpoint, self._built.bell)

    def configure(self, spec: ServerSpec) -> None:
        self._built.configure(spec)

    def serve(self) -> Outcome:
        # What building the first optimizer would load, in most of a second, while all workers wait for it.
        importlib.import_module("torch._dynamo")
        try:
            self._built.serve()
            return Outcome(num_steps=self._iteration())
        except BaseException as error:
            return outcome_of(error, num_steps=self._iteration())
        finally:
            self._line.close()

    def stop(self) -> None:
        self._built.stop()

    @property
    def _built(self) -> ParameterService:
        assert self._service is not None
        return self._service

    def _iteration(self) -> int:
        """Asked by the control line from its start, which is before the service's."""
        return self._service.iteration if self._service is not None else 0

    def _abort(self, reason: str) -> None:
        if self._service is not None:
            self._service.stop()


def _configure(
    spec: WorldSpec, servers: list[Any], layout: Layout, optimizer: OptimizerSpec, ranges: Sequence[KeyRange]
) -> None:
    """Have every server build its shard. Set-up goes through Ray, which can carry a script's own optimizer class."""
    requests = []
    for server, pieces in zip(servers, ranges, strict=True):
        rule = spec.strategy.admission_rule(spec.membership)
        assert rule is not None
        own = ServerSpec(layout, pieces, optimizer, rule, spec.config.max_steps, spec.strategy.aggregator())
        requests.append(server.configure.remote(own))
    ray.get(requests)


def _device_of(worker: WorkerInfo, local_rank: int) -> torch.device:
    # Ray shows a worker the devices that it was given, or all of them where it was given a share of each.
    return torch.device("cuda", local_rank % worker.num_devices)
