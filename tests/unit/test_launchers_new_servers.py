"""The launcher starts servers that were asked for, others in dead ones' places, and names those that do not come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, final

import pytest
from ray.exceptions import RayError

from paceline.engines.ray import new_servers
from paceline.engines.ray.new_servers import NewServers
from paceline.server.chains import Chains

WITHIN_S = 60.0


@final
class Run:
    """Two servers train. Of those that start, those that are `there` have said who they are, and `failed` ones are
    dead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, replacements: int) -> None:
        self.now_s = 0.0
        self.there: set[str] = set()
        self.failed: set[str] = set()
        self.events: list[str] = []
        self.lines: list[str] = []
        ray = SimpleNamespace(wait=self.wait, get=self.get, kill=lambda actor: None)
        node = SimpleNamespace(node_id="a", address="10.0.0.1")
        monkeypatch.setattr(new_servers, "ray", ray)
        monkeypatch.setattr(new_servers, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(new_servers, "own_node_id", lambda: "a")
        monkeypatch.setattr(new_servers, "roomiest", lambda *given, **named: node)
        monkeypatch.setattr(new_servers, "actor_of", lambda *given, **named: SimpleNamespace(remote=self.actor))
        chains = Chains.first(["a", "a"], replicas=1, epoch=1, num_ranges=4)
        self.takeover: Any = SimpleNamespace(has_begun=True, is_on_one_host=True, join=self.join, chains=chains)
        controller: Any = SimpleNamespace(event=self.event, address=None, expelled=())
        members: Any = SimpleNamespace(actors={}, infos={}, pending={}, forget=lambda name: None)
        watching: Any = SimpleNamespace(add=lambda *given: None, add_server=lambda *given, **named: None)
        self.servers = NewServers(
            controller,
            members,
            watching,
            watching,
            self.takeover,
            environment={},
            replacements=replacements,
            within_s=WITHIN_S,
            say=self.lines.append,
        )

    def actor(self, address: object, number: int) -> Any:
        name = f"server-{number}"
        remote = SimpleNamespace(remote=lambda: name)
        return SimpleNamespace(hello=remote, serve=remote)

    def wait(self, futures: list[str], **_: object) -> tuple[list[str], list[str]]:
        ready = [name for name in futures if name in self.there | self.failed]
        return ready, [name for name in futures if name not in ready]

    def get(self, name: str) -> Any:
        if name in self.failed:
            raise RayError("its host has no room")
        return SimpleNamespace(node_id="a", pid=int(name.partition("-")[2]))

    def event(self, name: str, who: str, **details: object) -> None:
        self.events.append(f"{name} {who}")

    def join(self, server: int, info: object) -> None:
        self.takeover.chains = self.takeover.chains.joined(server, "a")

    def die(self, server: int) -> None:
        self.takeover.chains = self.takeover.chains.died(server)[0]

    def turns(self) -> list[str]:
        """What has come to pass since the last time."""
        before = len(self.events)
        for _ in range(3):
            self.servers.turn()
        return self.events[before:]


def test_a_server_that_was_asked_for_and_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It spends no replacement: a server that dies later has one."""
    run = Run(monkeypatch, replacements=1)
    assert run.servers.scale(3) == "the run has 2 servers; 1 more start"
    run.failed.add("server-2")
    assert run.turns() == ["starting server-2", "not_joined server-2"]
    assert run.lines[-1] == (
        "server 2 does not join: it could not be started: its host has no room; it was asked for, and is not tried "
        "again; the others go on, servers: 2"
    )
    run.there.add("server-3")
    run.die(0)
    assert run.turns() == ["starting server-3", "server_joined server-3"]
    run.die(1)
    assert run.turns() == []
    run.there.add("server-4")
    assert run.servers.scale(2) == "the run has 1 servers; 1 more start"
    assert run.turns() == ["starting server-4", "server_joined server-4"]


def test_a_server_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, replacements=0)
    run.servers.scale(4)
    run.there.add("server-3")
    assert run.turns() == ["starting server-2", "starting server-3", "server_joined server-3"]
    run.now_s = WITHIN_S
    assert run.turns() == []
    run.now_s = WITHIN_S + 1
    assert run.turns() == ["not_joined server-2"]
    assert "server 2 does not join: it did not start within 60 s; it was asked for" in run.lines[-1]
    assert run.servers.scale(3) == "the run has 3 servers"


def test_a_replacement_that_fails_is_tried_again_while_replacements_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, replacements=2)
    run.failed.update(["server-2", "server-3"])
    run.die(0)
    assert run.turns() == [f"{what} server-{number}" for number in (2, 3) for what in ("starting", "not_joined")]
    assert "asked for" not in run.lines[-1]


def test_one_that_was_asked_for_and_one_in_a_dead_ones_place_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever starts first."""
    run = Run(monkeypatch, replacements=1)
    run.servers.scale(3)
    run.die(0)
    assert run.turns() == ["starting server-2", "starting server-3"]
    run.failed.add("server-2")
    run.there.add("server-3")
    assert run.turns() == ["not_joined server-2", "server_joined server-3"]
    assert run.turns() == []
    assert len(run.takeover.chains.living) == 2
