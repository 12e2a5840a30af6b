"""Workers that come while others train: in a dead one's place, and as many more as are asked for."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, final

import ray
from ray.exceptions import RayError

from paceline.elastic import Elastic
from paceline.engines.ray.control import LauncherAddress
from paceline.engines.ray.controller import Controller
from paceline.engines.ray.liveness import Watch
from paceline.engines.ray.members import Members, actor_of, last_line
from paceline.engines.ray.nodes import Place, own_node_id, roomiest
from paceline.engines.ray.survival import Survival, rank_of
from paceline.engines.ray.takeover import Takeover
from paceline.engines.ray.worker_actor import WorkerActor
from paceline.engines.ray.world_spec import Newcomer, WorkerInfo, WorldSpec
from paceline.errors import UsageError

CAME_TOO_LATE = "its script came to its end before it had a batch"


@final
class Newcomers:
    """Starts them beside those that train, and names those that fail to come, which leaves the run as it is.

    Args:
        spec: what the run began with.
        program: as Ray keeps it.
        environment: variables that they are given.
        takeover: where servers may die, and others have their key ranges.
        say: shows a line where the run was started.
    """

    def __init__(
        self,
        elastic: Elastic,
        survival: Survival,
        controller: Controller,
        members: Members,
        watch: Watch,
        *,
        spec: WorldSpec,
        program: Any,
        environment: Mapping[str, str],
        takeover: Takeover | None,
        say: Callable[[str], None],
    ) -> None:
        self._takeover = takeover
        self._elastic, self._survival, self._controller = elastic, survival, controller
        self._members, self._watch, self._say = members, watch, say
        self._spec, self._program, self._environment = spec, program, environment
        self._launcher: LauncherAddress = controller.address
        self._wanted = self._next_rank = spec.size
        self._is_asked = False  # for another number, before the run has begun
        self._replacements_left = elastic.replacements
        self._starting: dict[Any, str] = {}
        self._coming: list[str] = []
        self._nodes = {name: info.node_id for name, info in members.infos.items()}

    def turn(self) -> None:
        """Look who is there by now, and who is not and will not be."""
        if self._is_asked and self._survival.has_begun and self._survival.staying:
            self.scale(self._wanted)
        self._coming = [name for name in self._coming if rank_of(name) not in self._survival.ranks]
        is_served = self._takeover is None or self._takeover.is_settled
        starting = list(self._starting) if is_served else []
        ready, _ = ray.wait(starting, num_returns=len(starting), timeout=0) if starting else ([], 0)
        for future in ready:
            name = self._starting.pop(future)
            try:
                self._begin(name, ray.get(future))
            except RayError as error:
                self._fail(name, f"could not be started: {last_line(error)}")
        members = self._members
        for name in list(self._coming):
            outcome = members.outcomes.get(name)
            if name in members.dead:
                self._fail(name, self._survival.why(name))
                self.replace_lost()
            elif outcome is not None:
                self._fail(name, outcome.error or CAME_TOO_LATE)
        for name in self._survival.left & members.outcomes.keys() & members.actors.keys():
            why = members.outcomes[name].error
            if why is not None:
                self._say(f"worker {rank_of(name)} failed when it had left: {why}; the others go on")
            if why is not None or name in self._controller.gone:  # nothing is to be heard of it any more
                ray.kill(members.forget(name))

    def replace_lost(self) -> None:
        """Somebody has died: start another worker, if that was asked for and is not done yet."""
        if self._replacements_left and len(self._survival.staying) + len(self._coming) < self._wanted:
            self._replacements_left -= 1
            self._start()

    def scale(self, wanted: int) -> str:
        """Have so many workers, as soon as they have come or left; says what happens. Raises UsageError where that
        cannot be."""
        staying = self._survival.staying
        require_allowed(self._elastic, wanted)
        if not staying:
            raise UsageError("the run is about to end")
        self._wanted, self._is_asked = wanted, True
        if not self._survival.has_begun:
            return f"{len(staying)} workers start; there are to be {wanted} once they train"
        self._is_asked = False
        more = wanted - len(staying) - len(self._coming)
        for _ in range(more):
            self._start()
        given_up = self._coming[len(self._coming) + min(0, max(more, -len(self._coming))) :]
        for name in given_up:
            self.give_up(name)
        leaving = staying[len(staying) + min(0, more + len(given_up)) :]
        for rank in leaving:
            self._survival.retire(rank)
        told = [f"{len(staying)} workers train"]
        told += [f"{len(self._coming)} more start"] if self._coming else []
        told += [f"{len(leaving)} leave after their present step"] if leaving else []
        return "; ".join(told)

    def give_up_all(self) -> None:
        """The others have come to their end."""
        for name in list(self._coming):
            self.give_up(name)

    def give_up(self, name: str) -> None:
        """It is not wanted any more."""
        self._controller.event("given_up", name)
        self._dismiss(name)

    def _start(self) -> None:
        rank, self._next_rank = self._next_rank, self._next_rank + 1
        name = f"worker-{rank}"
        variables = {"runtime_env": {"env_vars": dict(self._environment)}} if self._environment else {}
        node = roomiest(self._num_workers, doubtful=self._places_of(self._controller.expelled))
        self._nodes[name] = node.node_id
        where = Place(node, 0.0, 0.0)  # Ray may have given all cores to those that train, which share them
        actor = actor_of(WorkerActor, where, **variables).remote(uses_cuda=False)
        self._members.actors[name] = actor
        self._starting[actor.hello.remote()] = name
        self._coming.append(name)
        self._controller.event("starting", name, address=node.address)
        self._say(f"worker {rank} starts at {node.address}, to join the others")

    @property
    def _num_workers(self) -> Counter[str]:
        """How many workers each node has that train, or are about to."""
        return self._places_of(self._members.actors)

    def _places_of(self, names: Iterable[str]) -> Counter[str]:
        return Counter(self._nodes[name] for name in names if name in self._nodes)

    def _begin(self, name: str, info: WorkerInfo) -> None:
        members, rank = self._members, rank_of(name)
        members.infos[name] = info
        is_here = info.node_id == own_node_id()
        if is_here:
            self._watch.add(name, info.pid)
        self._survival.add(name, info.pid, is_here=is_here)
        newcomer = Newcomer(
            rank,
            num_threads=max(1, info.num_cores // self._num_workers[info.node_id]),
            num_first=self._spec.num_first,
            in_pieces=self._spec.is_apart,
        )
        spec = replace(self._spec, workers=(info,), is_resumed=False, newcomer=newcomer)
        if self._takeover is not None:
            spec = replace(spec, chains_now=self._takeover.chains, joined=self._takeover.joined)
        members.pending[members.actors[name].run.remote(spec, rank, self._program, self._launcher, [])] = name

    def _fail(self, name: str, why: str) -> None:
        self._controller.event("not_joined", name, process=self._survival.pid(name), why=why)
        self._say(f"worker {rank_of(name)} does not join: {why}; the others go on")
        self._dismiss(name)

    def _dismiss(self, name: str) -> None:
        self._coming.remove(name)
        self._starting = {future: other for future, other in self._starting.items() if other != name}
        with contextlib.suppress(Exception):
            ray.kill(self._members.forget(name))
        self._survival.end(name)


def require_allowed(elastic: Elastic, wanted: int) -> None:
    """Raises UsageError for a number of workers that the run cannot have."""
    if not elastic.at_least <= wanted <= elastic.at_most:
        raise UsageError(
            f"--workers {wanted}: the run was started with --elastic {elastic.at_least}:{elastic.at_most}, and so "
            f"has {elastic.at_least} to {elastic.at_most} workers"
        )
