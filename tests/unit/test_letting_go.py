"""The launcher waits for servers in the midst of a turn, and hears its members meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engines.ray import letting_go
from paceline.engines.ray.lane_desk import LaneDesk
from paceline.engines.ray.letting_go import LettingGo
from paceline.engines.ray.members import Members
from paceline.server.whole_pushes import Parted

TURNS = 3
NOTHING = Parted(None, None, reaches_memory=False)


class Ray:
    """Servers answer once the launcher has had so many turns."""

    def __init__(self) -> None:
        self.turns: list[float] = []

    def wait(self, futures: Sequence[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return (list(futures) if len(self.turns) >= TURNS else []), []

    def get(self, future: Any) -> Any:
        return future.answer


class Future:
    def __init__(self, answer: Any) -> None:
        self.answer = answer


def actor() -> Any:
    parting, going = (SimpleNamespace(remote=lambda *_, said=said: Future(said)) for said in (NOTHING, {}))
    return SimpleNamespace(part_with=parting, let_go=going)


class Takeover:
    """Nobody serves the key range before the launcher has had its turns."""

    def __init__(self, ray: Ray) -> None:
        self._ray = ray

    def part_with(self, worker: str) -> None: ...

    def call_off(self) -> None: ...

    def head_of(self, key_range: int) -> str | None:
        return "server-0" if len(self._ray.turns) >= TURNS else None


@pytest.mark.parametrize("may_die", [False, True])
def test_members_are_heard_while_servers_are_waited_for(monkeypatch: pytest.MonkeyPatch, may_die: bool) -> None:
    """Where there is nobody to ask, it waits for members instead."""
    ray, events = Ray(), list[tuple[Any, ...]]()
    monkeypatch.setattr(letting_go, "ray", ray)
    controller: Any = SimpleNamespace(event=lambda *given, **details: events.append(given))
    letting = LettingGo(
        controller,
        Members(actors={"server-0": actor()}),
        LaneDesk(controller, num_workers=2, say=print),
        num_ranges=1,
        takeover=Takeover(ray) if may_die else None,  # type: ignore[arg-type]
        deadline_s=60.0,
        turn=ray.turns.append,
    )
    letting.let_go(1)
    assert events == [("let_go", "worker-1")]
    assert len(ray.turns) == TURNS
    assert all((timeout_s > 0) == may_die for timeout_s in ray.turns)
