"""The launcher has servers given copies, knows word of one attempt from word of the next, and sets aside what fails."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, final

import pytest

from paceline.engines.ray import copying_anew
from paceline.engines.ray.copying_anew import CopyingAnew
from paceline.server.chains import Chain, Chains, to_body

LACKING = Chain(0, (0,), 1)


@final
class Launcher:
    """Of a run with two servers, or more, of which all but the first have just come. What it is asked for it does at
    once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chains: Chains | None = None) -> None:
        monkeypatch.setattr(copying_anew, "_AGAIN_S", 0.0)
        ray = SimpleNamespace(wait=lambda futures, timeout: (futures, []), get=lambda future: future)
        monkeypatch.setattr(copying_anew, "ray", ray)
        self.chains = chains or Chains((LACKING,), {0: "a", 1: "a"}, replicas=1, has_grown=True)
        self.told: list[tuple[str, Chain]] = []
        self.lines: list[str] = []
        self.aside: list[tuple[int, int]] = []
        infos: Any = {server: SimpleNamespace(endpoint=f"endpoint-{server}") for server in self.chains.hosts}
        controller: Any = SimpleNamespace(event=lambda *given, **details: None)
        self.copying = CopyingAnew(
            controller,
            infos,
            chains=lambda: self.chains,
            change=self.change,
            tell=lambda name, chain: self.told.append((name, chain)),
            set_aside=self.set_aside,
            say=self.lines.append,
        )
        remote = SimpleNamespace(remote=lambda *given: None)
        actor = SimpleNamespace(spec_of=remote, replicate_anew=remote)
        self.servers = {f"server-{server}": actor for server in self.chains.hosts}

    @property
    def chain(self) -> Chain:
        return self.chains.chains[0]

    def change(self, chain: Chain) -> None:
        self.chains = self.chains.changed(chain)

    def set_aside(self, key_range: int, server: int) -> None:
        self.aside.append((key_range, server))
        self.chains = self.chains.without_move(key_range, server)

    def under_way(self) -> Chain | None:
        """What becomes a copy after the next turns."""
        for _ in range(2):
            self.copying.turn(self.servers)
        return next((chain for chain in self.chains.chains if chain.newcomer is not None), None)

    def build(self) -> None:
        self.copying.turn(self.servers)
        assert not self.copying.is_idle

    def begin(self) -> Chain:
        self.build()
        self.copying.turn(self.servers)
        assert self.chain.newcomer == 1
        return self.chain

    def hear(self, chain: Chain, why_not: str) -> None:
        self.copying.hear({**to_body(chain), "why_not": why_not})


def test_word_of_an_attempt_at_a_copy_is_not_taken_for_word_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(monkeypatch)
    first = launcher.begin()
    launcher.hear(first, "it has no room")
    assert launcher.chain == LACKING
    second = launcher.begin()
    for why_not in ("it has no room", ""):
        launcher.hear(first, why_not)
    assert launcher.chain.newcomer == 1
    launcher.hear(second, "")
    assert launcher.chain.servers == (0, 1)


def test_a_newcomer_that_fails_before_it_is_told_that_it_is_one_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """All it knows is the chain that it was built by."""
    launcher = Launcher(monkeypatch)
    built_by = replace(launcher.chain, newcomer=1)
    launcher.begin()
    launcher.hear(built_by, "it has no room")
    assert launcher.chain == LACKING


def test_who_has_built_for_nothing_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since the chain has changed meanwhile."""
    launcher = Launcher(monkeypatch)
    launcher.build()
    built_by = launcher.chain.version
    launcher.change(replace(launcher.chain, epoch=2))
    launcher.copying.turn(launcher.servers)
    ((name, told),) = launcher.told
    assert (name, told) == ("server-1", replace(LACKING, epoch=2))
    assert told.version > built_by


def test_who_has_died_since_it_was_built_is_no_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chain named it when the launcher heard of its death."""
    launcher = Launcher(monkeypatch)
    launcher.build()
    launcher.chains, changed = launcher.chains.died(1)
    assert changed == []
    launcher.copying.turn(launcher.servers)
    assert launcher.chain == LACKING


def test_a_copy_that_has_failed_too_often_is_set_aside_and_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 1 gets a copy of what it can have. It is asked again once another one has joined."""
    chains = Chains((Chain(0, (0,), 1), Chain(1, (0,), 1)), {0: "a", 1: "a"}, replicas=1, has_grown=True)
    launcher = Launcher(monkeypatch, chains)
    made: list[int] = []
    for _ in range(copying_anew._ATTEMPTS + 1):
        chain = launcher.under_way()
        assert chain is not None
        made.append(chain.key_range)
        launcher.hear(chain, "" if chain.key_range else "it has no room")
    assert made == [0] * copying_anew._ATTEMPTS + [1]
    assert launcher.aside == [(0, 1)]
    assert launcher.lines[0] == "server 1 gets no copy of key range 0 until servers die or join: it has no room"
    assert launcher.under_way() is None
    launcher.chains = launcher.chains.died(1)[0].joined(2, "a")
    launcher.servers["server-2"] = launcher.servers["server-1"]
    assert launcher.under_way() == Chain(0, (0,), 1, newcomer=2)


def test_a_copy_that_cannot_be_moved_leaves_others_to_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(monkeypatch, Chains.first(["a", "a"], replicas=1, epoch=1, num_ranges=4).joined(2, "a"))
    made: list[int] = []
    for _ in range(2 * copying_anew._ATTEMPTS):
        chain = launcher.under_way()
        assert chain is not None
        made.append(chain.key_range)
        launcher.hear(chain, "it has no room")
    first, *_, last = made
    assert made == [first] * copying_anew._ATTEMPTS + [last] * copying_anew._ATTEMPTS
    assert launcher.aside == [(first, 2), (last, 2)]


def test_attempts_are_counted_anew_after_a_copy_has_been_made(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(monkeypatch)
    for _ in range(3):
        for why_not in ["it has no room"] * (copying_anew._ATTEMPTS - 1) + [""]:
            launcher.hear(launcher.begin(), why_not)
        assert launcher.chain.servers == (0, 1)
        launcher.change(launcher.chain.without(1))
    assert launcher.aside == []
