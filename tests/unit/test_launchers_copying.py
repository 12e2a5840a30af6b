"""The launcher has servers given copies, and knows word of one attempt from word of the next."""

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
    """Of a run with two servers, the second of which has just come. What it is asked for it does at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(copying_anew, "_AGAIN_S", 0.0)
        ray = SimpleNamespace(wait=lambda futures, timeout: (futures, []), get=lambda future: future)
        monkeypatch.setattr(copying_anew, "ray", ray)
        self.chains = Chains((LACKING,), {0: "a", 1: "a"}, replicas=1, has_grown=True)
        self.told: list[tuple[str, Chain]] = []
        infos: Any = {server: SimpleNamespace(endpoint=f"endpoint-{server}") for server in range(2)}
        controller: Any = SimpleNamespace(event=lambda *given, **details: None)
        self.copying = CopyingAnew(
            controller,
            infos,
            chains=lambda: self.chains,
            change=self.change,
            tell=lambda name, chain: self.told.append((name, chain)),
            say=print,
        )
        remote = SimpleNamespace(remote=lambda *given: None)
        actor = SimpleNamespace(spec_of=remote, replicate_anew=remote)
        self.servers = {f"server-{server}": actor for server in range(2)}

    @property
    def chain(self) -> Chain:
        return self.chains.chains[0]

    def change(self, chain: Chain) -> None:
        self.chains = self.chains.changed(chain)

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
