"""The launcher's half of a run whose servers have replicas: it notices which server is gone, says who serves its key
ranges from then on, and has others given copies in its place, those that have joined among them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

from paceline.engines.ray.controller import Controller
from paceline.engines.ray.copying_anew import CopyingAnew
from paceline.engines.ray.members import Members
from paceline.engines.ray.spreading import Spreading
from paceline.engines.ray.world_spec import ServerInfo, joined_to_body
from paceline.errors import RunFailed
from paceline.messages import Kind
from paceline.server.chains import Chain, Chains, from_body, to_body


@final
class Takeover:
    """Raises RunFailed where every copy of a key range is gone.

    Args:
        servers: of the start, in the order of their key ranges.
        why: what ended a server's process, as far as is known.
        say: shows a line where the run was started.
        remedy: what can be done once the run has failed, in words.
    """

    def __init__(
        self,
        chains: Chains,
        controller: Controller,
        *,
        servers: Sequence[ServerInfo],
        why: Callable[[str], str],
        say: Callable[[str], None],
        remedy: Callable[[], str],
    ) -> None:
        self.chains, self._controller = chains, controller
        self._infos = dict(enumerate(servers))
        self.joined: dict[int, ServerInfo] = {}
        """Servers that were not there at the start, by number."""
        self.is_on_one_host = len({*chains.hosts.values()}) == 1
        """Whether all servers were on one host at the start."""
        self._why, self._say, self._remedy = why, say, remedy
        self._awaited: dict[int, tuple[Chain, float]] = {}  # by key range: who is to serve it, and since when
        self._parted: set[str] = set()
        self._told: set[str] = set()  # workers
        self._copying = CopyingAnew(
            controller,
            self._infos,
            chains=lambda: self.chains,
            change=self._change,
            tell=self._tell,
            set_aside=self._set_aside,
            say=say,
        )
        self._spreading = Spreading(
            controller,
            chains=lambda: self.chains,
            change=self._change,
            serve=self._have_served,
            set_aside=self._set_aside,
            say=say,
        )

    def head_of(self, key_range: int) -> str | None:
        """Who serves it; none: another one is about to."""
        return None if key_range in self._awaited else f"server-{self.chains.chains[key_range].head}"

    def join(self, server: int, info: ServerInfo) -> None:
        """A new server is there, and is given copies from here on."""
        self.joined[server] = self._infos[server] = info
        self.chains = self.chains.joined(server, info.node_id)

    def spread(self) -> None:
        """Have the load be even, if servers have died or joined. Not to be called while servers are asked about a key
        range."""
        if self.is_settled and self._copying.is_idle:
            self._spreading.turn()

    def call_off(self) -> None:
        """Servers are to be asked about key ranges: whoever is about to hand one over goes on with it."""
        self._spreading.call_off()

    @property
    def is_settled(self) -> bool:
        """Whether every key range is served."""
        return not self._awaited

    def part_with(self, worker: str) -> None:
        """It is told no more who serves: nothing that it pushes is to be heard by a server that does not know."""
        self._parted.add(worker)

    def turn(self, members: Members) -> None:
        """Servers that have died are no members any more, and others have their key ranges."""
        self._tell_newcomers()
        self._hear()
        for name in sorted(members.dead & members.servers.keys()) if self.has_begun else ():
            members.forget(name)
            self._controller.forget(name)
            self._lose(name)
        while self.is_settled and self._controller.of_copies:
            kind, body = self._controller.of_copies.popleft()
            (self._copying if kind is Kind.COPIED else self._spreading).hear(body)
        if self.is_settled and not members.dead & members.servers.keys():
            self._copying.turn(members.servers)

    @property
    def has_begun(self) -> bool:
        """Whether servers have been built, as far as is known here."""
        updates = [number for name, number in self._controller.num_steps.items() if name.startswith("server")]
        return self._controller.progress.phase == "training" or any(updates)

    def _lose(self, name: str) -> None:
        """This server's process has ended: have the next ones of its chains go on."""
        server, now_s = int(name.partition("-")[2]), time.monotonic()
        served = [chain.key_range for chain in self.chains.chains if chain.servers[0] == server]
        after, changed = self.chains.died(server)
        self.chains = replace(after, chains=self.chains.chains)
        process, left, why = self._infos[server].pid, len(self.chains.living), self._why(name)
        self._controller.event("server_lost", name, process=process, why=why, key_ranges=served, left=left)
        self._say(f"server {server} (process {process}) is lost: {why}; servers left: {left}")
        self._require_all(changed)
        for chain in changed:
            if chain.key_range in served:
                self._awaited[chain.key_range] = chain, now_s
            self._change(chain)

    def _change(self, chain: Chain) -> None:
        """From here on this is the chain of its key range, as those in it are told, and those that were."""
        before = self.chains.chains[chain.key_range]
        self.chains = self.chains.changed(chain)
        chain = self.chains.chains[chain.key_range]
        told = (*before.servers, *chain.servers, before.newcomer, chain.newcomer)
        for server in sorted(self.chains.living.intersection(told)):
            self._tell(f"server-{server}", chain)

    def _set_aside(self, key_range: int, server: int) -> None:
        """A move has failed: until servers die or join this one stays what it is to the key range."""
        self.chains = self.chains.without_move(key_range, server)
        self._controller.event("set_aside", f"server-{server}", key_range=key_range)

    def _have_served(self, chain: Chain) -> None:
        """The first of this chain, which has a copy, is to serve its key range."""
        self._awaited[chain.key_range] = chain, time.monotonic()
        self._change(chain)

    def _tell(self, name: str, chain: Chain) -> None:
        self._controller.tell(name, Kind.CHAIN, **to_body(chain), **joined_to_body(self.joined))

    def _hear(self) -> None:
        """Take in which servers have taken over, and send workers there."""
        while self._controller.serves:
            chain = from_body(self._controller.serves.popleft())
            awaited, since_s = self._awaited.get(chain.key_range, (None, 0.0))
            if chain != awaited:
                continue
            del self._awaited[chain.key_range]
            for name in self._told - self._parted:
                self._tell(name, chain)
            took_s, copies = time.monotonic() - since_s, len(chain.servers)
            self._controller.event(
                "taken_over", f"server-{chain.head}", key_range=chain.key_range, copies=copies, took_s=took_s
            )
            self._say(
                f"server {chain.head} has key range {chain.key_range} now, {took_s:.2f} s later; copies of it: {copies}"
            )

    def _tell_newcomers(self) -> None:
        """Who has just said a first word may have come before the last servers died."""
        for name in {name for name in self._controller.num_steps if name.startswith("worker")} - self._told:
            self._told.add(name)
            for chain in () if self.chains.is_of_the_start else self.chains.chains:
                if chain.key_range not in self._awaited:
                    self._tell(name, chain)

    def _require_all(self, changed: list[Chain]) -> None:
        lost = [chain.key_range for chain in changed if not chain.servers]
        if lost:
            dead = " and ".join(f"server {each} (process {self._infos[each].pid})" for each in self.chains.dead)
            ranges = ", ".join(map(str, lost))
            raise RunFailed(f"{dead} have died, and with them every copy of key range {ranges}; {self._remedy()}")
