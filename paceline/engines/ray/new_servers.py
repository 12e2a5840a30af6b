"""Servers that come while others serve: in a dead one's place, and as many more as are asked for."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, final

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


@final
class NewServers:
    """Starts them, makes them known, and names those that fail to come, which leaves the run as it is. What they get,
    and serve, is the takeover's affair.

    Args:
        environment: variables that they are given.
        replacements: so many times one starts for a server that has died.
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
        say: Callable[[str], None],
    ) -> None:
        self._controller, self._members, self._watch = controller, members, watch
        self._survival, self._takeover, self._say = survival, takeover, say
        self._environment, self._replacements_left = environment, replacements
        self._wanted = self._next = len(takeover.chains.hosts)
        self._num_asked = 0  # for which no replacement is spent
        self._starting: dict[Any, tuple[str, Node]] = {}

    def turn(self) -> None:
        """Start whoever is lacking, and look who is there by now."""
        if not self._takeover.has_begun:
            return
        for _ in range(self._wanted - self._num_there):
            if self._num_asked:
                self._num_asked -= 1
            elif self._replacements_left:
                self._replacements_left -= 1
            else:
                break
            self._start()
        ready, _ = (
            ray.wait([*self._starting], num_returns=len(self._starting), timeout=0) if self._starting else ([], 0)
        )
        for future in ready:
            name, node = self._starting.pop(future)
            try:
                self._begin(name, ray.get(future), node)
            except RayError as error:
                why = last_line(error)
                self._controller.event("not_joined", name, process=None, why=why)
                self._say(f"server {_number(name)} does not join: it could not be started: {why}; the others go on")
                self._dismiss(name)

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
        for name, _ in self._starting.values():
            self._controller.event("given_up", name)
            self._dismiss(name)
        self._starting.clear()
        self._wanted = 0

    @property
    def _num_there(self) -> int:
        """Servers that are there, or are about to be."""
        return len(self._takeover.chains.living) + len(self._starting)

    def _start(self) -> None:
        number, self._next = self._next, self._next + 1
        name, node = f"server-{number}", self._room()
        variables = {"runtime_env": {"env_vars": dict(self._environment)}} if self._environment else {}
        where = Place(node, 0.0, 0.0)  # Ray may have given all cores to those that are there
        actor = actor_of(ServerActor, where, max_concurrency=3, **variables).remote(self._controller.address, number)
        self._members.actors[name] = actor
        self._starting[actor.hello.remote()] = name, node
        self._controller.event("starting", name, address=node.address)
        self._say(f"server {number} starts at {node.address}, to join the others")

    def _room(self) -> Node:
        """The host with the fewest servers a core, one without a copy of what lacks a copy if there is such a one."""
        chains, infos = self._takeover.chains, self._members.infos
        count = Counter(chains.hosts[server] for server in chains.living)
        count.update(node.node_id for _, node in self._starting.values())
        lacking = [chain for chain in chains.chains if len(chain.servers) <= chains.replicas]
        return roomiest(
            count,
            doubtful={infos[name].node_id for name in self._controller.expelled if name in infos},
            shunned={chains.hosts[server] for chain in lacking for server in chain.servers},
            # Copies that were on one host at first read workers' memory, which others cannot.
            among={*chains.hosts.values()} if self._takeover.is_on_one_host else None,
        )

    def _begin(self, name: str, info: ServerInfo, node: Node) -> None:
        members, is_here = self._members, info.node_id == own_node_id()
        members.infos[name] = info
        if is_here:
            self._watch.add(name, info.pid)
        self._survival.add_server(name, info.pid, is_here=is_here)
        members.pending[members.actors[name].serve.remote()] = name
        self._takeover.join(_number(name), info)
        num_servers = len(self._takeover.chains.living)
        self._controller.event("server_joined", name, process=info.pid, address=node.address, servers=num_servers)
        self._say(f"server {_number(name)} (process {info.pid}) joins; servers: {num_servers}")

    def _dismiss(self, name: str) -> None:
        with contextlib.suppress(Exception):
            ray.kill(self._members.forget(name))


def _number(name: str) -> int:
    return int(name.partition("-")[2])
