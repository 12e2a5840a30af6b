"""Where a key range has lost a copy, or is to have one elsewhere, another server is given one."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, final

import ray
from ray.exceptions import RayError

from paceline.engines.ray.controller import Controller
from paceline.engines.ray.members import last_line
from paceline.engines.ray.world_spec import ServerInfo
from paceline.server.chains import Chain, Chains, from_body
from paceline.server.spreading import departure, removal

_ATTEMPTS = 5
_AGAIN_S = 1.0
"""How long to wait after an attempt that failed: what was in the way, such as a worker that is just being let go, is
mostly gone by then."""


class _Building(NamedTuple):
    chain: Chain
    """With the newcomer, who is told how to build what is to become its copy."""
    future: Any
    since_s: float


@final
class CopyingAnew:
    """Sees to one key range after another: first to those that have too few copies, then to those whose copies would
    lie better elsewhere. A copy that a server cannot get after some attempts is set aside, and the others are made.

    Args:
        infos: of all servers, by number.
        chains: as they are.
        change: has one of them be so from here on.
        tell: tells somebody, by name, how one of them is.
        set_aside: has a server get no copy of a key range.
        say: shows a line where the run was started.
    """

    def __init__(
        self,
        controller: Controller,
        infos: Mapping[int, ServerInfo],
        *,
        chains: Callable[[], Chains],
        change: Callable[[Chain], None],
        tell: Callable[[str, Chain], None],
        set_aside: Callable[[int, int], None],
        say: Callable[[str], None],
    ) -> None:
        self._controller, self._infos = controller, infos
        self._chains, self._change, self._tell, self._say = chains, change, tell, say
        self._set_aside = set_aside
        self._building: _Building | None = None
        self._since_s: dict[int, float] = {}  # by key range that has a newcomer
        self._built_by: dict[int, int] = {}  # by key range, the version of its chain that its newcomer was built by
        self._failures: Counter[tuple[int, int | None, frozenset[int]]] = Counter()
        """By key range, who was to get a copy of it, and the servers that lived."""
        self._not_before_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no server is about to be given a copy."""
        return self._building is None

    def turn(self, servers: Mapping[str, Any]) -> None:
        """To be called while all key ranges are served. `servers`: the actors of those that live."""
        if self._building is None:
            self._begin(servers)
        elif ray.wait([self._building.future], timeout=0)[0]:
            self._end_building(self._building)

    def _begin(self, servers: Mapping[str, Any]) -> None:
        if self._chains().is_of_the_start or time.monotonic() < self._not_before_s:
            return
        for chain in self._wanted():
            newcomer, last = f"server-{chain.newcomer}", f"server-{chain.servers[-1]}"
            if newcomer in servers and last in servers:
                spec = servers[last].spec_of.remote(chain.key_range)  # goes to the newcomer, and is not read here
                endpoints = {server: info.endpoint for server, info in self._infos.items()}
                future = servers[newcomer].replicate_anew.remote(spec, chain, endpoints)
                self._building = _Building(chain, future, time.monotonic())
                return

    def _wanted(self) -> list[Chain]:
        """Chains with those that are to have a copy."""
        chains = self._chains()
        lacking = list(chains.lacking())
        if lacking or departure(chains) is not None or not all(chain.is_at_rest for chain in chains.chains):
            return lacking
        moved = removal(chains)
        return [] if moved is None else [moved]

    def _end_building(self, building: _Building) -> None:
        chain, _, self._since_s[building.chain.key_range] = building
        self._building = None
        try:
            ray.get(building.future)
        except RayError as error:
            self._fail(chain, last_line(error))
            return
        chains = self._chains()
        now = chains.chains[chain.key_range]
        if chain.newcomer not in chains.living:
            return  # it has died since, while no chain named it
        if now == replace(chain, newcomer=None):
            self._controller.event("copying", f"server-{chain.newcomer}", key_range=chain.key_range)
            self._change(chain)
            self._built_by[chain.key_range] = chain.version
        else:  # what was built is for nothing
            self._tell(f"server-{chain.newcomer}", now)

    def hear(self, body: Mapping[str, Any]) -> None:
        """Take in what has become of a newcomer; to be called while all key ranges are served."""
        told, why_not = from_body(body), str(body.get("why_not"))
        chain = self._chains().chains[told.key_range]
        if chain.newcomer is None or (chain.newcomer, chain.servers[-1:]) != (told.newcomer, told.servers[-1:]):
            return  # one of the two has died since
        if told.version < self._built_by[told.key_range]:
            return  # of an attempt before
        if why_not:
            self._change(replace(chain, newcomer=None))
            self._fail(chain, why_not)
        else:
            self._change(chain.extended())
            del self._failures[self._attempts_at(chain)]
            self._tell_of(chain.extended())

    def _tell_of(self, chain: Chain) -> None:
        server, took_s = chain.servers[-1], time.monotonic() - self._since_s[chain.key_range]
        copies = len(chain.servers)
        self._controller.event("copied", f"server-{server}", key_range=chain.key_range, copies=copies, took_s=took_s)
        self._say(
            f"server {server} has key range {chain.key_range} copied, {took_s:.2f} s later; copies of it: {copies}"
        )

    def _fail(self, chain: Chain, why: str) -> None:
        newcomer, key_range, attempts = chain.newcomer, chain.key_range, self._attempts_at(chain)
        assert newcomer is not None
        self._failures[attempts] += 1
        self._not_before_s = time.monotonic() + _AGAIN_S
        self._controller.event("not_copied", f"server-{newcomer}", key_range=key_range, why=why)
        if self._failures[attempts] == _ATTEMPTS:
            self._set_aside(key_range, newcomer)
            self._say(f"server {newcomer} gets no copy of key range {key_range} until servers die or join: {why}")

    def _attempts_at(self, chain: Chain) -> tuple[int, int | None, frozenset[int]]:
        """The key under which failed attempts are counted: key range, newcomer, and who lives."""
        return chain.key_range, chain.newcomer, self._chains().living
