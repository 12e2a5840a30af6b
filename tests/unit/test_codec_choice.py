"""Workers that meet anew, of whom some have chosen a codec by then."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.codec import Auto, Chosen, OneBit, PowerSGD
from paceline.comm.base import Collective
from paceline.membership import Membership
from paceline.strategies.base import Context
from paceline.strategies.codec_choice import CodecChoice
from paceline.strategies.coding import NOTHING_CODED
from tests.unit.collective_harness import World

SIZE = 3
CHOSEN = Chosen(PowerSGD(), "powersgd: it is the quickest", OneBit())


def context_of(collective: Collective, *, local_size: int = 1) -> Context:
    rank, size = collective.rank, collective.size
    return Context(rank, Membership.first(size), 0, local_size, torch.device("cpu"), collective)


def met_anew(
    collective: Collective, chosen_on: Sequence[int], are_together: bool
) -> tuple[list[str], dict[str, Any], int]:
    """What each has before it meets the others anew, and after that; what is told of it; and how often it has begun to
    watch."""
    begun = []

    def watch(auto: Auto, context: Context, coding: Any) -> Any:
        begun.append(context.rank)
        return SimpleNamespace(step_ended=lambda: CHOSEN if context.rank in chosen_on else None)

    choice = CodecChoice(Auto(among="one-bit+powersgd"), "links", watch)
    found = [choice.begin(context_of(collective))]
    choice.look()
    found.append(choice.take_up() if choice.has_found else None)
    found.append(choice.rejoin(context_of(collective, local_size=SIZE if are_together else 1)))
    said = ["none" if coding is None else f"{coding.codec} after {coding.before}" for coding in found]
    return said, dict(choice.told({"bucket_mb": 1.0, "codec": "as before"})), len(begun)


@pytest.mark.parametrize("chosen_on", [(0, 1, 2), (0,), (2,)])
def test_what_one_has_chosen_is_everybodys(chosen_on: Sequence[int]) -> None:
    """Others may have missed the exchange in which that was, or join."""
    with World("shared_memory", SIZE) as world:
        for rank, (said, told, num_begun) in enumerate(world.run(met_anew, chosen_on, False)):
            taken = "powersgd after one-bit" if rank in chosen_on else "none"
            assert said == ["none", taken, "powersgd after one-bit"]
            assert told == {"bucket_mb": 1.0, "codec": CHOSEN.why}
            assert num_begun == 1


def test_before_anybody_has_chosen_watching_begins_anew() -> None:
    with World("shared_memory", SIZE) as world:
        for said, told, num_begun in world.run(met_anew, (), False):
            assert (said, told, num_begun) == (["none"] * 3, {"bucket_mb": 1.0}, 2)


def test_on_one_host_nothing_is_coded_whatever_was_chosen() -> None:
    with World("shared_memory", SIZE) as world:
        for said, told, num_begun in world.run(met_anew, (0, 1, 2), True):
            assert said == ["none", "powersgd after one-bit", "none"]
            assert told == {"bucket_mb": 1.0, "codec": NOTHING_CODED}
            assert num_begun == 1
