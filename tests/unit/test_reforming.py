"""A worker that meets those who are left of an elastic run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist

from paceline.comm.alone import AloneCollective
from paceline.comm.wire import Keys
from paceline.elastic import Member
from paceline.engines.ray.control import ControlLine, LauncherAddress
from paceline.engines.ray.reforming import Reforming
from paceline.membership import Membership
from paceline.messages import Kind, Raw
from tests.threads import running, started_since
from tests.unit.collective_harness import later

MEET_S = 5.0


class Line:
    """Of a launcher that has two workers of two hosts meet, of which the other one is gone: it says so a moment later,
    and then has this one go on alone."""

    def __init__(self) -> None:
        self.on_lost: Callable[[int, Sequence[int]], None] = lambda epoch, gone: None
        self.num_told = 0

    def check(self) -> None:
        """The run goes on."""

    def ask(self, kind: Kind, body: Mapping[str, Any], payload: Sequence[Raw] = ()) -> Mapping[str, Any]:
        self.num_told += 1
        ranks = [0, 1] if self.num_told == 1 else [0]
        if self.num_told == 1:
            later(0.3, self.on_lost, 2, [1])
        sites = {str(rank): {**body["site"], "host": f"host-{rank}"} for rank in ranks}
        return {"epoch": 1 + self.num_told, "ranks": ranks, "step": 0, "met": 0, "sites": sites}


def test_word_of_a_loss_ends_a_meeting() -> None:
    before, line = running(), Line()
    reforming = Reforming(
        cast(ControlLine, line),
        AloneCollective(),
        LauncherAddress("tcp://127.0.0.1:1", Keys.generate(), 1, "a run"),
        rank=0,
        host="host-0",
        address="127.0.0.1",
        store=dist.HashStore(),
        deadline_s=300.0,
        meet_within_s=MEET_S,
        add=lambda collective: None,
    )
    began_s = time.monotonic()
    formed = reforming(Member(0, Membership.first(2)), tuple)
    assert time.monotonic() - began_s < MEET_S
    assert (formed.member.membership.ranks, formed.collective.size, line.num_told) == ((0,), 1, 2)
    assert not started_since(before), "the meeting that was given up has come to its end"
