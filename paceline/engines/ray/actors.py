"""The processes of a run, as Ray actors: workers that run the script, servers that hold the model."""

import contextlib
import importlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import ray
import torch
from torch.distributed import PrefixStore

from paceline.checkpoint import Checkpoint
from paceline.comm.base import Store
from paceline.comm.connecting import Site, connect_members, gpu_identity, needs_store
from paceline.comm.mailbox import Mailbox
from paceline.comm.meeting import exchange
from paceline.comm.run_store import RunStore
from paceline.comm.servers.line import BellAddress
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import Move, Moves, ServerAddress, connect_servers
from paceline.comm.shared_memory.block import BlockAddress
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.comm.socket_mailbox import SocketMailbox
from paceline.config import RunConfig
from paceline.engines.ray.control import ControlLine, LauncherAddress
from paceline.engines.ray.liveness import RUN_VARIABLE, bind_forks_to_this_process
from paceline.engines.ray.nodes import own_address, own_node_id
from paceline.engines.ray.output import captured
from paceline.engines.ray.reforming import Reforming
from paceline.engines.scripting import Outcome, Program, outcome_of, run_program
from paceline.engines.world import World, enter
from paceline.errors import Aborted, UsageError
from paceline.layout import Layout
from paceline.membership import Membership
from paceline.memory import keep_freed_memory
from paceline.messages import Kind
from paceline.server.chains import Chain, Chains, to_body
from paceline.server.ranges import KeyRange
from paceline.server.spec import OptimizerSpec, ServerSpec
from paceline.strategies.base import Context, Strategy


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker tells of itself before the world is known."""

    pid: int
    node_id: str
    address: str
    memory: BlockAddress
    gpus: tuple[str, ...]
    """Identities of the GPUs that the worker sees; none in a run on CPUs."""
    num_cores: int


@dataclass(frozen=True)
class ServerInfo:
    """What a server tells of itself."""

    pid: int
    node_id: str
    endpoint: str
    bell: BellAddress


@dataclass(frozen=True)
class Newcomer:
    """A worker that comes while others train."""

    rank: int
    num_threads: int


@dataclass(frozen=True)
class WorldSpec:
    """The whole world, as every worker is told it. Ranks run host by host."""

    epoch: int
    workers: tuple[WorkerInfo, ...]
    servers: tuple[ServerInfo, ...]
    strategy: Strategy
    config: RunConfig
    is_resumed: bool
    num_at_start: int
    """Workers that the run began with, where it was resumed with others."""
    newcomer: Newcomer | None = None
    """The only worker of this world, until it has joined the others."""

    @property
    def membership(self) -> Membership:
        ranks = tuple(range(self.size)) if self.newcomer is None else (self.newcomer.rank,)
        return Membership(self.epoch, ranks)

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
        return max(1, worker.num_cores // len(self.ranks_on(worker.node_id)))

    @property
    def chains(self) -> Chains | None:
        """Who holds which key range at the start, if servers have replicas."""
        replicas, hosts = self.strategy.traits.num_replicas, [server.node_id for server in self.servers]
        return Chains.first(hosts, replicas=replicas, epoch=self.epoch) if replicas else None

    def server_address(self, server: int, *, node_id: str) -> ServerAddress:
        """As members on that node reach it."""
        info = self.servers[server]
        return ServerAddress(info.endpoint, info.bell if info.node_id == node_id else None)

    def ranks_on(self, node_id: str) -> list[int]:
        return [rank for rank, worker in enumerate(self.workers) if worker.node_id == node_id]

    def local_rank(self, rank: int) -> int:
        return self.ranks_on(self.workers[rank].node_id).index(rank)

    def gpu_index(self, rank: int) -> int | None:
        """Which of the GPUs that a worker sees is its own.

        Ray shows a worker those that it was given, or all of them where it was given a share of each.
        """
        num_gpus = len(self.workers[rank].gpus)
        return self.local_rank(rank) % num_gpus if num_gpus else None

    @property
    def members(self) -> list[Site]:
        members = []
        for rank, worker in enumerate(self.workers):
            index = self.gpu_index(rank)
            gpu = None if index is None else worker.gpus[index]
            members.append(Site(worker.node_id, gpu, worker.memory))
        return members


@final
class _Ends:
    """What a worker holds that waits for others, so that an abort ends every wait."""

    def __init__(self) -> None:
        self._ends: list[Any] = []
        self._reason: str | None = None

    def add(self, end: Any) -> None:
        self._ends.append(end)
        if self._reason is not None:
            end.abort(self._reason)

    def abort(self, reason: str) -> None:
        """Callable from any thread."""
        self._reason = reason
        for end in self._ends:
            end.abort(reason)

    def check(self) -> None:
        """Raise `Aborted` after an abort."""
        if self._reason is not None:
            raise Aborted(self._reason)

    def close(self) -> None:
        for end in reversed(self._ends):
            with contextlib.suppress(Exception):
                end.close()


@final
class WorkerActor:
    """One worker. `hello`, then `run`, which returns how the program ended instead of raising."""

    def __init__(self, *, uses_cuda: bool) -> None:
        self._uses_cuda = uses_cuda
        self._memory = SharedMemoryCollective.prepare()

    def hello(self) -> WorkerInfo:
        return WorkerInfo(
            os.getpid(),
            own_node_id(),
            own_address(),
            self._memory.address,
            _visible_gpus() if self._uses_cuda else (),
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
        ends = _Ends()
        moves: Moves = Moves()
        world: World | None = None

        def move(chain: Chain) -> None:
            address = spec.server_address(chain.head, node_id=spec.workers[rank].node_id)
            moves.append(Move(chain.key_range, address, chain.epoch))

        def progress() -> int:
            return world.progress() if world is not None else 0

        def awaits_others() -> bool:
            return world is not None and world.awaits_others()

        line = ControlLine(
            launcher,
            identity=f"worker-{rank}",
            progress=progress,
            on_abort=ends.abort,
            awaits_others=awaits_others,
            epoch=lambda: world.epoch() if world is not None else 0,
            on_chain=move,
        )
        try:
            world = self._enter_world(spec, rank, launcher, line, servers, ends, moves)
            with captured(line.say):
                run_program(program)
                for finish in world.at_end:
                    finish()
            return Outcome(num_steps=progress())
        except BaseException as error:
            return outcome_of(error, num_steps=progress())
        finally:
            if world is not None:
                world.release()
            line.close()
            ends.close()
            enter(None)

    def _enter_world(
        self,
        spec: WorldSpec,
        rank: int,
        launcher: LauncherAddress,
        line: ControlLine,
        servers: list[Any],
        ends: _Ends,
        moves: Moves,
    ) -> World:
        newcomer = spec.newcomer
        place = rank if newcomer is None else 0
        me = spec.workers[place]
        torch.set_num_threads(spec.num_threads(rank) if newcomer is None else newcomer.num_threads)
        keep_freed_memory()
        index = spec.gpu_index(place)
        device = torch.device("cpu") if index is None else torch.device("cuda", index)
        meeting_place = _meet(spec, place, launcher, ends)
        collective = connect_members(
            spec.members,
            rank=place,
            memory=self._memory,
            store=meeting_place,
            address=me.address,
            device=device,
            deadline_s=spec.config.deadline_s,
        )
        ends.add(collective)

        def store_of(number: int) -> Store:
            store = connect_servers(
                launcher.keys,
                servers=[spec.server_address(index, node_id=me.node_id) for index in range(len(spec.servers))],
                collective=collective,
                configure=partial(_configure, spec, servers, number),
                epoch=spec.epoch,
                deadline_s=spec.config.deadline_s,
                number=number,
                moves=moves if spec.chains is not None else None,
            )
            ends.add(store)
            return store

        def connect_mailbox() -> Mailbox:
            mailbox = SocketMailbox(
                launcher.keys,
                host=me.address,
                collective=collective,
                epoch=spec.epoch,
                deadline_s=spec.config.deadline_s,
            )
            ends.add(mailbox)
            return mailbox

        context = Context(
            rank=rank,
            membership=spec.membership,
            local_rank=spec.local_rank(place),
            local_size=len(spec.ranks_on(me.node_id)),
            device=device,
            collective=collective,
            store=store_of(0) if spec.servers else None,
            store_beside=store_of if spec.servers else None,
            connect_mailbox=connect_mailbox if spec.size > 1 else None,
            reform=Reforming(
                line, collective, deadline_s=spec.config.deadline_s, add=ends.add, joins=newcomer is not None
            )
            if spec.config.elastic is not None
            else None,
            num_at_start=spec.num_at_start,
        )
        restored = Checkpoint.decode(line.load_checkpoint(), where="the checkpoint") if spec.is_resumed else None
        world = World(context, spec.strategy, spec.config, line, restored, meeting_place)
        enter(world)
        return world


@final
class ServerActor:
    """One parameter server. `serve` runs in one thread until `stop`, called in another."""

    def __init__(self, launcher: LauncherAddress, index: int) -> None:
        torch.set_num_threads(1)
        self._service: ParameterService | None = None
        self._line = ControlLine(
            launcher,
            identity=f"server-{index}",
            progress=self._iteration,
            on_abort=self._abort,
            on_chain=lambda chain: self._built.reform(chain),
        )
        self._service = ParameterService(
            launcher.keys,
            host=own_address(),
            index=index,
            epoch=launcher.epoch,
            reporter=self._line,
            on_serving=lambda chain: self._line.tell(Kind.SERVES, to_body(chain)),
        )

    def hello(self) -> ServerInfo:
        return ServerInfo(os.getpid(), own_node_id(), self._built.endpoint, self._built.bell)

    def configure(self, spec: ServerSpec) -> None:
        self._built.configure(spec)

    def replicate(self, spec: ServerSpec, chain: Chain, endpoints: dict[int, str]) -> None:
        self._built.replicate(spec, chain, endpoints=endpoints)

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
    spec: WorldSpec,
    servers: list[Any],
    number: int,
    layout: Layout,
    optimizer: OptimizerSpec,
    ranges: Sequence[KeyRange],
) -> None:
    """Have every server build its shards for the optimizer of this number. Set-up goes through Ray, which can carry a
    script's own optimizer class."""
    specs = [
        spec.strategy.server_spec(
            layout, pieces, optimizer, members=spec.membership, max_updates=spec.config.max_steps, number=number
        )
        for pieces in ranges
    ]
    if spec.chains is None:
        ray.get([server.configure.remote(own) for server, own in zip(servers, specs, strict=True)])
        return
    endpoints = {index: server.endpoint for index, server in enumerate(spec.servers)}
    ray.get(
        [
            servers[server].replicate.remote(specs[chain.key_range], chain, endpoints)
            for chain in spec.chains.chains
            for server in chain.servers
        ]
    )


def _meet(spec: WorldSpec, rank: int, launcher: LauncherAddress, ends: _Ends) -> RunStore | None:
    """The launcher's store, if workers need one, as soon as all have come to it: so whoever is missing is named."""
    if not needs_store(spec.members):
        return None
    store = RunStore(launcher.keys, endpoint=launcher.endpoint, identity=f"store-{rank}", epoch=launcher.epoch)
    ends.add(store)
    deadline_s, check = spec.config.deadline_s, ends.check
    exchange(PrefixStore("present", store), "", rank=rank, size=spec.size, deadline_s=deadline_s, check=check)
    return store


def _visible_gpus() -> tuple[str, ...]:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not devices:
        raise UsageError("Ray gave this worker a GPU, but torch sees none here; use a torch with CUDA, or --device cpu")
    return tuple(str(gpu_identity(device)) for device in devices)
