"""A script whose worker is struck, and which writes down what it has done, or all have."""

import functools
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from paceline.comm.servers.group import ServerGroup
from paceline.comm.servers.line import WorkerLine
from paceline.comm.servers.self_service import SelfService, SelfServices
from paceline.comm.servers.sockets import SocketCarrier
from paceline.comm.socket_mailbox import SocketMailbox
from paceline.engines import striking
from paceline.engines.ray.reforming import Reforming
from paceline.engines.scripting import Script, run_program
from paceline.engines.striking import Places
from paceline.engines.world import current
from paceline.roster import Roster
from paceline.server.spec import Push, Reply
from paceline.strategies.base import StepOutcome
from paceline.strategies.digests import digest
from paceline.strategies.exchange import Exchange
from paceline.strategies.federated.clients import Clients
from paceline.strategies.federated.joining import Joined, Joining
from paceline.strategies.federated.server import ServerModel
from paceline.strategies.federated.synchronizer import FederatedSynchronizer
from paceline.strategies.gossip.asynchronous import PairSynchronizer
from paceline.strategies.gossip.links import Links
from paceline.strategies.gossip.pairing import Pairing
from paceline.strategies.outer_model import OuterModel
from paceline.strategies.overlap import Overlap
from paceline.strategies.quorum import QuorumSynchronizer
from paceline.strategies.repeating import Repeating
from paceline.strategies.serving import ServerSynchronizer
from paceline.strategies.traits import Traits
from paceline.training.anew import Anew
from paceline.training.batches import Batches
from paceline.training.elastic import Survivor
from paceline.training.entering import Entering
from paceline.training.joining import States
from paceline.training.pauses import Pauses
from paceline.training.redealt import Redealt
from paceline.training.sharding.dealt import Dealt
from paceline.training.sharding.division import RankBatch
from paceline.training.sharding.orders import Orders
from paceline.training.sharding.part import Part

AMONG_WORKERS = Places(
    often={
        "is between steps": (Batches, "_on_return"),
        "is in a pause": (Pauses, "meet"),
        "has gradients": (Repeating, "keep"),
        "gives its part": (Exchange, "start"),
        "waits for gradients": (Overlap, "end"),
        "waits for changes": (OuterModel, "wait"),
        "sends its model": (Links, "start"),
        "waits for models": (Links, "settle"),
        "has the result": (Survivor, "commit"),
    },
    after_a_death={"has stopped": (Reforming, "_told"), "goes on with others": (Dealt, "resize")},
    at_a_join={"gives its state": (Reforming, "give")},
    as_joiner={"takes a state": (States, "_entered")},
)
IN_TURNS = Places(
    often={
        "is between steps": (Batches, "_on_return"),
        "is in a pause": (Pauses, "meet"),
        "begins a turn": (FederatedSynchronizer, "begin_turn"),
        "contributes": (Joining, "add"),
        "says what clients keep": (Clients, "gathered"),
        "gives its part": (Joining, "join"),
        "has the result": (Redealt, "commit"),
    },
    after_a_death={"has stopped": (Reforming, "_told"), "goes on with others": (Roster, "deal_anew")},
    at_a_join={"gives its state": (Reforming, "give")},
    as_joiner={"takes a state": (States, "_entered")},
)
UNDER_SERVERS = Places(
    often={
        "is between steps": (Batches, "_on_return"),
        "is in a pause": (Pauses, "meet"),
        "has its gradients": (ServerSynchronizer, "step"),
        "has its change": (QuorumSynchronizer, "_exchange"),
        "pushes": (ServerGroup, "exchange"),
        "makes an update": (SelfService, "_update"),
        "has made one": (SelfService, "_receive"),
        "waits for others": (SelfServices, "sleep"),
        "asks a server": (WorkerLine, "send"),
        "waits for servers": (SocketCarrier, "_receive_some"),
        "has the parameters": (ServerSynchronizer, "_take"),
        "has what servers have": (QuorumSynchronizer, "_take"),
        "asks for what others have left": (Reforming, "next_left_over"),
    },
    after_a_death={"has stopped": (Reforming, "_told")},
    at_a_join={"gives its state": (Reforming, "give")},
    as_joiner={"takes a state": (Entering, "_entered")},
)
IN_PAIRS = Places(
    often={
        "is between steps": (Batches, "_on_return"),
        "is in a pause": (Pauses, "meet"),
        "has its gradient": (PairSynchronizer, "step"),
        "asks a neighbour": (Pairing, "ask"),
        "takes a model": (Pairing, "receive"),
        "waits for an answer": (SocketMailbox, "wait"),
        "asks for what others have left": (Reforming, "next_left_over"),
    },
    after_a_death={
        "has stopped": (Reforming, "_told"),
        "goes on with others": (PairSynchronizer, "rejoin"),
    },
    at_a_join={"gives its state": (Reforming, "give")},
    as_joiner={"takes a state": (Anew, "_entered")},
)
With = Literal["workers", "clients", "servers", "pairs"]
"""With whom a worker exchanges: with all others, or some of them, in steps that all have in common, or when each has
played its clients of a round; with servers; or with one neighbour after another."""
PLACES: Mapping[With, Places] = {
    "workers": AMONG_WORKERS,
    "clients": IN_TURNS,
    "servers": UNDER_SERVERS,
    "pairs": IN_PAIRS,
}


def exchanges_with(traits: Traits) -> With:
    """Under a strategy whose workers may die."""
    if traits.num_clients:
        return "clients"
    return "servers" if traits.outlives_workers else "pairs" if traits.meets_anew else "workers"


@final
@dataclass(frozen=True, repr=False)
class StruckProgram:
    """What each worker runs."""

    script: Script
    exchanges_with: With

    def __repr__(self) -> str:
        return self.script.path

    def __call__(self) -> None:
        world = current()
        assert world is not None
        who, num_steps = f"worker-{world.context.rank}", [0]
        places = PLACES[self.exchanges_with]
        _WRITING[self.exchanges_with](who, num_steps)
        # A death before the first step ends a run; who joins has not made one.
        striking.arm(who, places.all, may_strike=lambda place: num_steps[0] > 0 or place in places.as_joiner)
        run_program(self.script)


def _write_commits(who: str, num_commits: list[int]) -> None:
    """Which samples each committed step was made of, all workers' together, and what all have alike with it."""
    path = Path(os.environ[striking.VARIABLE], "committed", who)
    commit = Survivor.commit

    @functools.wraps(commit)
    def written(survivor: Survivor, **asks: Any) -> bool:
        samples = [sample for dealt in survivor.under_way for part in dealt.parts for sample in part]
        is_complete = commit(survivor, **asks)
        num_commits[0] += 1
        with path.open("a") as file:
            print(json.dumps([survivor.all_done.now[0], samples, _alike(survivor)], default=str), file=file)
        return is_complete

    _replace(Survivor, "commit", written)


def _alike(survivor: Survivor) -> str:
    """A digest of the parameters that are to be the same on all workers: in lock-step those before the update, which
    is applied after its commit, and in rounds the shared ones. Of neighbours each has its own."""
    synchronizer = survivor._run.prepared.synchronizer
    outer = getattr(synchronizer, "_outer", None)
    if isinstance(outer, OuterModel):
        return digest(outer._parameters)
    return digest(synchronizer.replica.parameters if survivor._is_stepwise else ())


def _write_rounds(who: str, num_rounds: list[int]) -> None:
    """Of how many clients, samples and batches each round is, and the server's model after it."""
    path = Path(os.environ[striking.VARIABLE], "committed", who)
    step_with = ServerModel.step_with

    @functools.wraps(step_with)
    def written(server: ServerModel, joined: Joined, *, round_number: int, **counts: int) -> tuple[bool, bool]:
        found = step_with(server, joined, round_number=round_number, **counts)
        num_rounds[0] += 1
        with path.open("a") as file:
            made_of = [joined.num_contributions, *joined.trained]
            print(json.dumps([round_number + 1, made_of, digest(server.parameters)]), file=file)
        return found

    _replace(ServerModel, "step_with", written)


def _write_pushes(who: str, num_steps: list[int]) -> None:
    """Which samples each of this worker's gradients, or changes, is of, by its clock, before any server can have it;
    none where it is to count nothing."""
    write = _writing_gradients(who)
    exchange = ServerGroup.exchange

    @functools.wraps(exchange)
    def written(group: ServerGroup, push: Push) -> Reply:
        write(group.clock, counts=not (push.void or push.stands_in))
        return exchange(group, push)

    _replace(ServerGroup, "exchange", written)
    for owner in (ServerSynchronizer, QuorumSynchronizer):
        _count_steps(owner, num_steps)


def _write_steps(who: str, num_steps: list[int]) -> None:
    """Which samples each of this worker's steps is of, counted from 1, before any neighbour can have it."""
    write = _writing_gradients(who)
    step, numbers = PairSynchronizer.step, itertools.count(1)

    @functools.wraps(step)
    def written(synchronizer: PairSynchronizer, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        write(next(numbers), counts=True)
        return step(synchronizer, update, pause_at=pause_at)

    _replace(PairSynchronizer, "step", written)
    _count_steps(PairSynchronizer, num_steps)


def _writing_gradients(who: str) -> Callable[..., None]:
    """What writes down, by a number, of which samples the gradient is that this worker gives now."""
    path = Path(os.environ[striking.VARIABLE], "pushed", who)
    fetched = Orders.fetched
    samples: list[Any] = []  # handed out since the last one

    @functools.wraps(fetched)
    def noted(orders: Orders, batches: Iterator[RankBatch], *given: int) -> Iterator[Part]:
        ahead: deque[RankBatch] = deque()

        def kept() -> Iterator[RankBatch]:
            for batch in batches:
                ahead.append(batch)
                yield batch

        for part in fetched(orders, kept(), *given):
            samples.extend(ahead.popleft().samples)
            yield part

    def write(number: int, *, counts: bool) -> None:
        with path.open("a") as file:
            print(json.dumps([number, samples if counts else []], default=str), file=file)
        samples.clear()

    _replace(Orders, "fetched", noted)
    return write


def _count_steps(owner: Any, num_steps: list[int]) -> None:
    """Those that this worker has made."""
    step = owner.step

    @functools.wraps(step)
    def counted(synchronizer: Any, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        outcome: StepOutcome = step(synchronizer, update, pause_at=pause_at)
        num_steps[0] += 1
        return outcome

    _replace(owner, "step", counted)


_WRITING: Mapping[With, Callable[[str, list[int]], None]] = {
    "workers": _write_commits,
    "clients": _write_rounds,
    "servers": _write_pushes,
    "pairs": _write_steps,
}


def _replace(owner: type, name: str, method: Callable[..., Any]) -> None:
    setattr(owner, name, method)
