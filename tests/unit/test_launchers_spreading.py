"""The launcher's half of moving key ranges between living servers, and what it answers to who asks for more servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import pytest

from paceline.elastic import Elastic
from paceline.engines.ray.answers import Answers
from paceline.engines.ray.spreading import Spreading
from paceline.engines.standing import Progress
from paceline.errors import UsageError
from paceline.server.chains import Chain, Chains, Handover, to_body


@final
class Launcher:
    """What `Spreading` is given, and what it has done."""

    def __init__(self) -> None:
        self.chains = Chains.first(["a", "a"], replicas=1, epoch=1, num_ranges=4).joined(2, "a")
        self.events: list[str] = []
        self.lines: list[str] = []
        self.served: list[Chain] = []
        about: dict[str, Any] = {"controller": self, "serve": self.serve, "say": self.lines.append}
        about["set_aside"] = self.set_aside
        self.spreading = Spreading(chains=lambda: self.chains, change=self.change, **about)

    def event(self, name: str, who: str, **details: Any) -> None:
        self.events.append(f"{name} {who}")

    def change(self, chain: Chain) -> None:
        self.chains = self.chains.changed(chain)

    def serve(self, chain: Chain) -> None:
        self.served.append(chain)
        self.change(chain)

    def set_aside(self, key_range: int, server: int) -> None:
        self.chains = self.chains.without_move(key_range, server)

    def give_copy(self, key_range: int) -> None:
        """To the server that has joined."""
        self.change(replace(self.chains.chains[key_range], newcomer=2).extended())

    def hear(self, chain: Chain, why_not: str = "") -> None:
        self.spreading.hear({**to_body(chain), "why_not": why_not})


def handing_over() -> tuple[Launcher, Chain]:
    """Server 2, which has copies and serves nothing, is to serve a key range."""
    launcher = Launcher()
    for key_range in (0, 1):
        launcher.give_copy(key_range)
        launcher.spreading.turn()
    assert launcher.events == ["released server-1", "released server-0"]
    launcher.spreading.turn()
    chain = launcher.chains.chains[0]
    assert chain.handover == Handover(2, 1)
    return launcher, chain


def test_a_key_range_is_served_by_another_when_its_head_has_stopped() -> None:
    launcher, chain = handing_over()
    launcher.spreading.turn()  # one at a time
    assert [each.handover for each in launcher.chains.chains[1:]] == [None] * 3
    launcher.hear(chain)
    assert launcher.served == [Chain(0, (2, 0), 2)]
    launcher.hear(chain)  # which is over
    assert len(launcher.served) == 1


def test_word_of_a_handover_that_was_called_off_is_not_heard() -> None:
    launcher, chain = handing_over()
    launcher.spreading.call_off()
    launcher.hear(chain)
    assert launcher.served == []
    launcher.spreading.turn()
    again = launcher.chains.chains[0]
    assert again.handover == Handover(2, 2)
    launcher.hear(chain)
    assert launcher.served == []
    launcher.hear(again)
    assert launcher.served == [Chain(0, (2, 0), 2)]


def test_who_cannot_hand_over_is_not_asked_again_until_servers_join() -> None:
    """Another key range is handed over in its place."""
    launcher, chain = handing_over()
    launcher.hear(chain, "LBFGS cannot be sent")
    assert launcher.events[-1] == "not_handed_over server-0"
    assert launcher.lines == ["server 0 keeps key range 0 until servers die or join: LBFGS cannot be sent"]
    launcher.spreading.turn()
    assert launcher.chains.chains[0] == replace(chain, handover=None)
    other = launcher.chains.chains[1]
    assert other.handover == Handover(2, 2)
    launcher.hear(other, "LBFGS cannot be sent")
    launcher.spreading.turn()
    assert all(each.is_at_rest for each in launcher.chains.chains)
    launcher.chains = launcher.chains.joined(3, "a")
    launcher.spreading.turn()
    assert launcher.chains.chains[0].handover == Handover(2, 3)


def test_another_lets_go_of_a_copy_where_the_head_cannot_hand_over() -> None:
    launcher = Launcher()
    launcher.chains = launcher.chains.died(1)[0]
    launcher.give_copy(0)
    launcher.chains = launcher.chains.joined(3, "a")
    launcher.change(replace(launcher.chains.chains[0], newcomer=3).extended())
    launcher.spreading.turn()
    chain = launcher.chains.chains[0]
    assert chain.handover is not None
    launcher.hear(chain, "LBFGS cannot be sent")
    launcher.spreading.turn()
    assert launcher.events[-1].startswith("released server-")
    assert len(launcher.chains.chains[0].servers) == 2


@final
class Scaled:
    """Workers, or servers, of which so many were asked for."""

    def __init__(self) -> None:
        self.wanted: list[int] = []

    def require_allowed(self, wanted: int) -> None:
        if wanted > 9:
            raise UsageError(f"{wanted} are too many")

    def scale(self, wanted: int) -> str:
        self.wanted.append(wanted)
        return f"{wanted} there"


def answers(*, is_elastic: bool = True) -> Answers:
    return Answers(Elastic(at_least=1, at_most=3) if is_elastic else None, Progress)


def scaled_by(asked: Answers, newcomers: Any, new_servers: Any) -> None:
    asked.scale_by(newcomers, new_servers)


def test_what_was_asked_for_before_the_run_had_begun_comes_then() -> None:
    asked, workers, servers = answers(), Scaled(), Scaled()
    assert "there are to be 2 workers and 4 servers" in asked({"do": "scale", "workers": 2, "servers": 4})
    scaled_by(asked, workers, servers)
    assert (workers.wanted, servers.wanted) == ([2], [4])
    assert asked({"do": "scale", "workers": None, "servers": 5}) == "5 there"
    assert (workers.wanted, servers.wanted) == ([2], [4, 5])


@pytest.mark.parametrize(("workers", "servers"), [(99, 3), (2, 99)])
def test_what_cannot_be_had_is_refused_before_any_of_it_is_done(workers: int, servers: int) -> None:
    asked, of_workers, of_servers = answers(), Scaled(), Scaled()
    scaled_by(asked, of_workers, of_servers)
    with pytest.raises(UsageError):
        asked({"do": "scale", "workers": workers, "servers": servers})
    assert of_workers.wanted == of_servers.wanted == []


def test_servers_without_replicas_and_runs_that_are_not_elastic_are_refused() -> None:
    asked = answers()
    scaled_by(asked, Scaled(), None)
    with pytest.raises(UsageError, match="since servers have no replicas"):
        asked({"do": "scale", "servers": 3})
    with pytest.raises(UsageError, match="its number of servers stays as it is"):
        answers(is_elastic=False)({"do": "scale", "servers": 3})
    with pytest.raises(UsageError, match="'many' is no number of servers"):
        asked({"do": "scale", "servers": "many"})
