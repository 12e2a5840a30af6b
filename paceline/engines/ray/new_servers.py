"""Servers that come while others serve: in a dead one's place, and as many more as are asked for."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import ray
from ray.exceptions import RayError

from paceline.engines.ray.controller import Controller
from paceline.engines.ray.liveness import Watch
from paceline.engines.ray.members import Members, actor_of, last_line
from paceline.engines.ray.nodes import Node, Place, own_node_id, roomiest
from paceline.engines.ray.server_actor import ServerActor
from paceline.engines.ray.survival import Survival
from paceline.engines.ray.takeover import Takeover
from paceline.engines.ray.world_spec import ServerInfo
from paceline.errors import UsageError


class _Starting(NamedTuple):
    name: str
    node: Node
    is_asked_for: bool
    """By who uses the run; otherwise it comes in a dead one's place."""
    until_s: float
    """When it is given up."""


@final
class NewServers:
    """Starts them, makes them known, and names those that fail to come, which leaves the run as it is. What they get,
    and serve, is the takeover's affair. One that was asked for and fails is not tried again.

    Args:
        environment: variables that they are given.
        replacements: so many times one starts for a server that has died.
        within_s: how long one may take to start.
        say: shows a line where the run was started.
    """

    def __init__(
        self,
        controller: Controller,
        members: Members,
        watch: Watch,
        survival: Survival,
        takeover: Takeover,
        *,
        environment: Mapping[str, str],
        replacements: int,
        within_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._controller, self._members, self._watch = controller, members, watch
        self._survival, self._takeover, self._say = survival, takeover, say
        self._environment, self._replacements_left, self._within_s = environment, replacements, within_s
        self._wanted = self._next = len(takeover.chains.hosts)
        self._num_asked = 0  # for which no replacement is spent
        self._starting: dict[Any, _Starting] = {}

    def turn(self) -> None:
        """Start whoever is lacking, and look who is there by now."""
        if not self._takeover.has_begun:
            return
        for _ in range(self._wanted - self._num_there):
            if self._num_asked:
                self._num_asked -= 1
                self._start(is_asked_for=True)
            elif self._replacements_left:
                self._replacements_left -= 1
                self._start(is_asked_for=False)
        waiting, now_s = list(self._starting), time.monotonic()
        ready, late = ray.wait(waiting, num_returns=len(waiting), timeout=0) if waiting else ([], [])
        for future in ready:
            starting = self._starting.pop(future)
            try:
                self._begin(starting, ray.get(future))
            except RayError as error:
                self._fail(starting, f"it could not be started: {last_line(error)}")
        for future in late:
            if now_s > self._starting[future].until_s:
                self._fail(self._starting.pop(future), f"it did not start within {self._within_s:g} s")

    def require_allowed(self, wanted: int) -> None:
        """Raises UsageError for fewer servers than there are, or more than can have anything."""
        chains, there = self._takeover.chains, self._num_there
        num_ranges, num_copies = len(chains.chains), chains.replicas + 1
        if wanted < there:
            raise UsageError(f"--servers {wanted}: the run has {there} servers, and those that are there stay")
        if wanted > num_ranges * num_copies:
            raise UsageError(
                f"--servers {wanted}: {num_ranges} key ranges with {num_copies} copies each are something for "
                f"{num_ranges * num_copies} servers at most; start a run with more by --option ranges=K"
            )

    def scale(self, wanted: int) -> str:
        """Have so many servers, as soon as they have come; says what happens. Raises UsageError as
        `require_allowed`."""
        self.require_allowed(wanted)
        there, num_ranges = self._num_there, len(self._takeover.chains.chains)
        self._wanted, self._num_asked = wanted, wanted - there
        told = f"the run has {there} servers"
        told += f"; {wanted - there} more start" if wanted > there else ""
        if wanted > num_ranges:
            told += f"; {num_ranges} at most serve a key range, for there are no more, and the others have copies"
        return told

    def give_up_all(self) -> None:
        """The run ends."""
        for starting in self._starting.values():
            self._controller.event("given_up", starting.name)
            self._dismiss(starting.name)
        self._starting.clear()
        self._wanted = 0

    @property
    def _num_there(self) -> int:
        """Servers that are there, or are about to be."""
        return len(self._takeover.chains.living) + len(self._starting)

    def _start(self, *, is_asked_for: bool) -> None:
        number, self._next = self._next, self._next + 1
        name, node = f"server-{number}", self._room()
        variables = {"runtime_env": {"env_vars": dict(self._environment)}} if self._environment else {}
        where = Place(node, 0.0, 0.0)  # Ray may have given all cores to those that are there
        actor = actor_of(ServerActor, where, max_concurrency=3, **variables).remote(self._controller.address, number)
        self._members.actors[name] = actor
        until_s = time.monotonic() + self._within_s
        self._starting[actor.hello.remote()] = _Starting(name, node, is_asked_for, until_s)
        self._controller.event("starting", name, address=node.address)
        self._say(f"server {number} starts at {node.address}, to join the others")

    def _room(self) -> Node:
        """The host with the fewest servers a core, one without a copy of what lacks a copy if there is such a one."""
        chains, infos = self._takeover.chains, self._members.infos
        count = Counter(chains.hosts[server] for server in chains.living)
        count.update(starting.node.node_id for starting in self._starting.values())
        lacking = [chain for chain in chains.chains if len(chain.servers) <= chains.replicas]
        return roomiest(
            count,
            doubtful={infos[name].node_id for name in self._controller.expelled if name in infos},
            shunned={chains.hosts[server] for chain in lacking for server in chain.servers},
            # Copies that were on one host at first read workers' memory, which others cannot.
            among={*chains.hosts.values()} if self._takeover.is_on_one_host else None,
        )

    def _begin(self, starting: _Starting, info: ServerInfo) -> None:
        members, name, is_here = self._members, starting.name, info.node_id == own_node_id()
        members.infos[name] = info
        if is_here:
            self._watch.add(name, info.pid)
        self._survival.add_server(name, info.pid, is_here=is_here)
        members.pending[members.actors[name].serve.remote()] = name
        self._takeover.join(_number(name), info)
        num_servers, address = len(self._takeover.chains.living), starting.node.address
        self._controller.event("server_joined", name, process=info.pid, address=address, servers=num_servers)
        self._say(f"server {_number(name)} (process {info.pid}) joins; servers: {num_servers}")

    def _fail(self, starting: _Starting, why: str) -> None:
        name = starting.name
        self._dismiss(name)
        if starting.is_asked_for:
            self._wanted -= 1
        self._controller.event("not_joined", name, process=None, why=why)
        told = f"server {_number(name)} does not join: {why}"
        told += "; it was asked for, and is not tried again" if starting.is_asked_for else ""
        self._say(f"{told}; the others go on, servers: {len(self._takeover.chains.living)}")

    def _dismiss(self, name: str) -> None:
        with contextlib.suppress(Exception):
            ray.kill(self._members.forget(name))


def _number(name: str) -> int:
    return int(name.partition("-")[2])
