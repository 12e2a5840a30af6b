"""The launcher's half of a run whose servers have replicas: it notices which server is gone, says who serves its key
ranges from then on, and has others given copies in its place."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

from paceline.engines.ray.controller import Controller
from paceline.engines.ray.copying_anew import CopyingAnew
from paceline.engines.ray.members import Members
from paceline.errors import RunFailed
from paceline.messages import Kind
from paceline.server.chains import Chain, Chains, from_body, to_body


@final
class Takeover:
    """Raises RunFailed where every copy of a key range is gone.

    Args:
        pids: the members' processes, by name.
        why: what ended a server's process, as far as is known.
        say: shows a line where the run was started.
        remedy: what can be done once the run has failed, in words.
    """

    def __init__(
        self,
        chains: Chains,
        controller: Controller,
        *,
        pids: Mapping[str, int],
        why: Callable[[str], str],
        say: Callable[[str], None],
        remedy: Callable[[], str],
    ) -> None:
        self.chains, self._controller, self._pids = chains, controller, pids
        self._why, self._say, self._remedy = why, say, remedy
        self._awaited: dict[int, tuple[Chain, float]] = {}  # by key range: who is to serve it, and since when
        self._parted: set[str] = set()
        self._told: set[str] = set()  # workers
        self._copying = CopyingAnew(controller, chains=lambda: self.chains, change=self._change, say=say)

    def head_of(self, key_range: int) -> str | None:
        """Who serves it; none: another one is about to."""
        return None if key_range in self._awaited else f"server-{self.chains.chains[key_range].head}"

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
        for name in sorted(members.dead & members.servers.keys()) if self._has_begun else ():
            members.forget(name)
            self._controller.forget(name)
            self._lose(name)
        if self.is_settled and not members.dead & members.servers.keys():
            self._copying.turn(members.servers)

    @property
    def _has_begun(self) -> bool:
        """Whether servers have been built, as far as is known here."""
        updates = [number for name, number in self._controller.num_steps.items() if name.startswith("server")]
        return self._controller.progress.phase == "training" or any(updates)

    def _lose(self, name: str) -> None:
        """This server's process has ended: have the next ones of its chains go on."""
        server, now_s = int(name.partition("-")[2]), time.monotonic()
        served = [chain.key_range for chain in self.chains.chains if chain.servers[0] == server]
        after, changed = self.chains.died(server)
        self.chains = replace(self.chains, dead=after.dead)
        process, left, why = self._pids[name], len(self.chains.chains) - len(self.chains.dead), self._why(name)
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
        told = {*before.servers, *chain.servers, before.newcomer, chain.newcomer} - {None, *self.chains.dead}
        for server in told:
            self._controller.tell(f"server-{server}", Kind.CHAIN, **to_body(chain))

    def _hear(self) -> None:
        """Take in which servers have taken over, and send workers there."""
        while self._controller.serves:
            chain = from_body(self._controller.serves.popleft())
            awaited, since_s = self._awaited.get(chain.key_range, (None, 0.0))
            if chain != awaited:
                continue
            del self._awaited[chain.key_range]
            for name in self._told - self._parted:
                self._controller.tell(name, Kind.CHAIN, **to_body(chain))
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
            for chain in self.chains.chains if self.chains.dead else ():
                if chain.key_range not in self._awaited:
                    self._controller.tell(name, Kind.CHAIN, **to_body(chain))

    def _require_all(self, changed: list[Chain]) -> None:
        lost = [chain.key_range for chain in changed if not chain.servers]
        if lost:
            dead = " and ".join(f"server {each} (process {self._pids[f'server-{each}']})" for each in self.chains.dead)
            ranges = ", ".join(map(str, lost))
            raise RunFailed(f"{dead} have died, and with them every copy of key range {ranges}; {self._remedy()}")
