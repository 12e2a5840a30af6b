"""The launcher's half of an elastic run under servers. These go on without a worker that is gone, and the others do
what it has not done of its data. Who joins does what others have not begun."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import ray
from ray.exceptions import RayError

from paceline.elastic import Done
from paceline.engines.ray.controller import Controller
from paceline.engines.ray.lane_desk import LaneDesk
from paceline.engines.ray.members import Members
from paceline.engines.ray.takeover import Takeover
from paceline.errors import RunFailed
from paceline.messages import Message
from paceline.server.admission import Decisions
from paceline.server.whole_pushes import what_counts

_ANSWER_S = 20.0
_TURN_S = 0.05


@final
class LettingGo:
    """Raises RunFailed where a server does not answer. One that has died ends the run elsewhere, or another one takes
    over, and is asked then.

    Args:
        desk: where workers ask for data.
        num_ranges: key ranges; without replicas each server has one.
        takeover: where servers may die, and others have their key ranges.
        deadline_s: after it, who is silent is ended.
        turn: has the launcher hear its members, for so many seconds at most, and look who has died and who serves. It
            does so while it waits for servers, since members' leases end where they hear nothing of it.
    """

    def __init__(
        self,
        controller: Controller,
        members: Members,
        desk: LaneDesk,
        *,
        num_ranges: int,
        takeover: Takeover | None,
        deadline_s: float,
        turn: Callable[[float], None],
    ) -> None:
        self._controller, self._members, self._desk = controller, members, desk
        self._num_ranges = num_ranges
        self._takeover, self._turn = takeover, turn
        self._answer_s = deadline_s + _ANSWER_S

    def let_go(self, rank: int) -> None:
        """This worker is gone. Its last gradient counts on all servers, or on none. What it has done is known before
        servers go on, and so before anybody asks what is left. The first server, which may decide for the others, goes
        on before them: they hear of its decisions here, of which the worker may have told some of them."""
        if self._takeover is not None:
            self._takeover.part_with(f"worker-{rank}")
        counts = what_counts(self._ask(lambda server, key_range: server.part_with.remote(key_range, rank)))
        done = Done(*counts.body["done"]) if counts is not None else Done()
        self._desk.gone(rank, done)
        decided: Decisions = {}
        for ranges in (range(1), range(1, self._num_ranges)):
            said = self._ask(partial(_letting_go, rank=rank, counts=counts, decided=decided), ranges)
            decided = next(iter(said), {})

    def let_in(self, rank: int) -> None:
        """This worker takes part from here on. A server that expects it makes no further bsp update without it, so that
        all can agree on the first one that it is to be in."""
        clock = max(self._ask(lambda server, key_range: server.expect.remote(key_range, rank)), default=0)
        self._ask(lambda server, key_range: server.let_in.remote(key_range, rank, clock))
        self._desk.book.come(rank)
        self._controller.event("let_in", f"worker-{rank}", clock=clock)

    def _ask(self, ask: Callable[[Any, int], Any], ranges: Sequence[int] | None = None) -> list[Any]:
        """Returns what the server of each key range, or of each of these, says. Where another one takes its place, that
        one is asked anew."""
        ranges = range(self._num_ranges) if ranges is None else ranges
        said: dict[int, Any] = {}
        asked: dict[int, tuple[str, Any]] = {}
        until_s = time.monotonic() + self._answer_s
        if self._takeover is not None:
            self._takeover.call_off()
        while len(said) < len(ranges):
            for key_range in ranges:
                server = self._server_of(key_range)
                is_asked = key_range in asked and asked[key_range][0] == server
                if server is not None and server in self._members.actors and key_range not in said and not is_asked:
                    asked[key_range] = server, ask(self._members.actors[server], key_range)
            waiting = {future: key_range for key_range, (_, future) in asked.items() if future is not None}
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_TURN_S) if waiting else ([], [])
            for future in ready:
                key_range = waiting[future]
                asked[key_range] = asked[key_range][0], None
                try:
                    said[key_range] = ray.get(future)
                except RayError:  # its process has ended, as the supervisor is about to see
                    if self._takeover is None:
                        return []
            if not ready:
                self._turn(0.0 if waiting else _TURN_S)
            if time.monotonic() > until_s:
                raise RunFailed(f"servers do not answer for {self._answer_s:g} s, and a worker has gone or come")
        return [said[key_range] for key_range in sorted(said)]

    def _server_of(self, key_range: int) -> str | None:
        return f"server-{key_range}" if self._takeover is None else self._takeover.head_of(key_range)


def _letting_go(server: Any, key_range: int, *, rank: int, counts: Message | None, decided: Decisions) -> Any:
    return server.let_go.remote(key_range, rank, counts, decided)
