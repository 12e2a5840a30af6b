"""A worker of a run, as a Ray actor: it runs the script."""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch.distributed import PrefixStore

from paceline.checkpoint import Checkpoint
from paceline.comm.base import Collective, Store
from paceline.comm.connecting import connect_members, gpu_identity, needs_store
from paceline.comm.mailbox import Mailbox
from paceline.comm.meeting import exchange
from paceline.comm.run_store import RunStore
from paceline.comm.servers.group import Joins
from paceline.comm.servers.sockets import Move, Moves, connect_servers
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.comm.socket_mailbox import SocketMailbox
from paceline.engines.ray.at_exit import done_with_script
from paceline.engines.ray.control import ControlLine, LauncherAddress
from paceline.engines.ray.liveness import RUN_VARIABLE, bind_forks_to_this_process, end_this_process
from paceline.engines.ray.nodes import own_address, own_node_id
from paceline.engines.ray.output import captured
from paceline.engines.ray.reforming import Reforming
from paceline.engines.ray.server_actor import configure
from paceline.engines.ray.world_spec import ServerInfo, WorkerInfo, WorldSpec
from paceline.engines.scripting import Outcome, Program, outcome_of, run_program
from paceline.engines.world import World, enter
from paceline.errors import Aborted, UsageError
from paceline.membership import Membership
from paceline.memory import keep_freed_memory
from paceline.messages import Kind
from paceline.seeding import derive, seed_everything
from paceline.server.chains import Chain
from paceline.strategies.base import Context

_END_WITHIN_S = 10.0  # who asks the launcher to end it does so itself if that does not come


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

    def __init__(self, *, uses_cuda: bool, host_cores: int | None = None) -> None:
        """`host_cores`: of this host, with which the run's workers may compute; none: all."""
        self._loaded = frozenset(sys.modules)
        self._uses_cuda, self._host_cores = uses_cuda, host_cores
        self._memory = SharedMemoryCollective.prepare()

    def hello(self) -> WorkerInfo:
        return WorkerInfo(
            os.getpid(),
            own_node_id(),
            own_address(),
            self._memory.address,
            _visible_gpus() if self._uses_cuda else (),
            min(len(os.sched_getaffinity(0)), self._host_cores or sys.maxsize),
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

        def move(chain: Chain, joined: Mapping[int, ServerInfo]) -> None:
            now = replace(spec, joined=joined)
            moves.append(Move(chain.key_range, now.address_of(chain, node_id=own_node_id())))

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
            on_lease_ended=end_this_process,
        )
        try:
            world = self._enter_world(spec, rank, launcher, line, servers, ends, moves)
            if world.strategy.traits.by_script:  # others seed in `paceline.init`; here what the script seeds holds
                seed_everything(derive(world.config.seed, "rank", rank))
            with captured(line.say):
                with done_with_script(self._loaded):
                    run_program(program)
                for finish in world.at_end:
                    finish()
            return Outcome(num_steps=progress())
        except BaseException as error:
            outcome = outcome_of(error, num_steps=progress())
            if outcome.is_memory and spec.config.elastic is not None and progress():
                _end_alone(line, rank, outcome, error)
            return outcome
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
        meeting_place = _meet(spec, rank, launcher, ends)
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
                servers=spec.server_addresses(node_id=me.node_id),
                collective=collective,
                configure=partial(configure, spec, servers, number),
                epoch=spec.epoch,
                deadline_s=spec.config.deadline_s,
                number=number,
                moves=moves if spec.chains is not None else None,
                joins=None if newcomer is None else Joins(rank, newcomer.in_pieces),
            )
            ends.add(store)
            return store

        def connect_mailbox(collective: Collective, membership: Membership) -> Mailbox:
            mailbox = SocketMailbox(
                launcher.keys,
                host=me.address,
                collective=collective,
                epoch=membership.epoch,
                deadline_s=spec.config.deadline_s,
            )
            ends.add(mailbox)
            if reforming is not None:
                reforming.watch(mailbox, membership)
            return mailbox

        reforming = None
        if spec.config.elastic is not None and meeting_place is not None:
            reforming = Reforming(
                line,
                collective,
                launcher,
                rank=rank,
                host=me.node_id,
                address=me.address,
                store=meeting_place,
                deadline_s=spec.config.deadline_s,
                meet_within_s=spec.config.elastic.deadline_s,
                add=ends.add,
                joins=newcomer is not None,
            )
        context = Context(
            rank=rank,
            membership=spec.membership,
            local_rank=spec.local_rank(place),
            local_size=len(spec.ranks_on(me.node_id)),
            device=device,
            collective=collective,
            store=store_of(0) if spec.servers else None,
            store_beside=store_of if spec.servers else None,
            connect_mailbox=connect_mailbox,
            reform=reforming,
            lane_keeper=reforming,
            num_first=spec.num_first,
            num_at_start=spec.num_at_start,
        )
        restored = Checkpoint.decode(line.load_checkpoint(), where="the checkpoint") if spec.is_resumed else None
        met_at = meeting_place if needs_store(spec.members) else None
        world = World(context, spec.strategy, spec.config, line, restored, met_at, address=me.address)
        enter(world)
        return world


def _end_alone(line: ControlLine, rank: int, outcome: Outcome, error: BaseException) -> None:
    """As a process that dies, and that says why: the others go on. The launcher ends it."""
    try:
        traceback.clear_frames(error.__traceback__)  # so that there is memory to speak
        line.tell(Kind.ENDS, {"rank": rank, "why": f"it has run out of memory ({outcome.error})"})
        time.sleep(_END_WITHIN_S)
    finally:
        end_this_process()


def _meet(spec: WorldSpec, rank: int, launcher: LauncherAddress, ends: _Ends) -> RunStore | None:
    """The launcher's store, if workers need one, as soon as all have come to it: so whoever is missing is named. Those
    who may come to an elastic run later may be on other hosts."""
    is_apart = needs_store(spec.members)
    if not is_apart and spec.config.elastic is None:
        return None
    store = RunStore(launcher.keys, endpoint=launcher.endpoint, identity=f"store-{rank}", epoch=launcher.epoch)
    ends.add(store)
    if is_apart:
        deadline_s, check = spec.config.deadline_s, ends.check
        exchange(PrefixStore("present", store), "", rank=rank, size=spec.size, deadline_s=deadline_s, check=check)
    return store


def _visible_gpus() -> tuple[str, ...]:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not devices:
        raise UsageError("Ray gave this worker a GPU, but torch sees none here; use a torch with CUDA, or --device cpu")
    return tuple(str(gpu_identity(device)) for device in devices)
