"""Hears a run's members, and knows who has ended, how, and who is dead."""

import time
from collections.abc import Callable
from typing import final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from paceline.engines.blame import Statement
from paceline.engines.ray.controller import Controller
from paceline.engines.ray.liveness import Watch
from paceline.engines.ray.members import Members, last_line
from paceline.engines.requests import Desk
from paceline.engines.scripting import Outcome
from paceline.engines.standing import Watcher

TURN_S = 0.05
_FAREWELL_S = 30.0  # how long members that have ended well may take to have their last records heard


@final
class Hearing:
    """Hears members out, and notes in `members` what became of them.

    Args:
        watch: of the members' processes on this host.
        desk: where commands from other terminals are answered.
        watcher: is shown how far the run is.
    """

    def __init__(self, controller: Controller, members: Members, watch: Watch, desk: Desk, watcher: Watcher) -> None:
        self._controller, self._members, self._watch = controller, members, watch
        self._desk, self._watcher = desk, watcher

    def turn(self, *, timeout_s: float) -> None:
        """Take what members say, and answer commands."""
        self._controller.turn(timeout_s=timeout_s)
        self._desk.turn()
        self._watcher.on_progress(self._controller.progress)

    def collect(self) -> None:
        """Take the results of members that have ended, and note those that died."""
        members = self._members
        for name in self._watch.ended():
            if name in members.pending.values():
                members.dead.add(name)
        if not members.pending:
            return
        ready, _ = ray.wait(list(members.pending), num_returns=len(members.pending), timeout=0)
        for future in ready:
            name = members.pending.pop(future)
            try:
                members.outcomes[name] = ray.get(future)
                members.dead.discard(name)
            except RayTaskError as error:
                members.outcomes[name] = Outcome(error=last_line(error), traceback=str(error))
            except (RayActorError, RayError):
                members.dead.add(name)

    def gather(self, is_enough: Callable[[], bool], *, limit_s: float) -> None:
        """Collect until enough is known, or the time is over."""
        until_s = time.monotonic() + limit_s
        while not is_enough() and self._members.pending and time.monotonic() < until_s:
            self.turn(timeout_s=TURN_S)
            self.collect()

    def hear_last_words(self, names: set[str]) -> None:
        """Members that have ended may still have records under way: wait for their goodbyes, which come last.

        The dead have said all they will.
        """
        until_s = time.monotonic() + _FAREWELL_S
        while not names <= self._controller.gone | self._members.dead and time.monotonic() < until_s:
            self.turn(timeout_s=TURN_S)
            self.collect()

    def statement(self, name: str) -> Statement:
        """Say what the launcher knows of this member."""
        members = self._members
        info = members.infos.get(name)
        return Statement(
            name,
            info.pid if info is not None else None,
            self._controller.num_steps.get(name, 0),
            members.outcomes.get(name),
            is_dead=name in members.dead,
        )
