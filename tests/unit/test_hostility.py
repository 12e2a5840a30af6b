"""Which workers are hostile while others come and leave, and what these know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.attacks import parse
from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.membership import Membership
from paceline.seeding import derive
from paceline.strategies.base import Context
from paceline.strategies.hostility import under_attack
from paceline.strategies.traits import Traits
from tests.unit.collective_harness import World

SIZE = 3
MEETING = Traits(lock_step=True, passes_attacks=True)
APART = Traits(lock_step=False, unit="gradient", passes_attacks=True)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World("shared_memory", SIZE) as world:
        yield world


def context_of(collective: Collective, ranks: tuple[int, ...], *, num_first: int) -> Context:
    return Context(
        rank=ranks[collective.rank],
        membership=Membership(2, ranks),
        local_rank=0,
        local_size=1,
        device=torch.device("cpu"),
        collective=collective,
        num_first=num_first,
    )


def sent(
    collective: Collective, attacks: list[str], ranks: tuple[int, ...], num_first: int, weights: tuple[float, ...]
) -> Tensor:
    """A worker of rank r computes r."""
    context = under_attack(parse(attacks), context_of(collective, ranks, num_first=num_first), MEETING)
    own = torch.full((2,), float(context.rank))
    context.corrupt([own], 0, weights=weights)
    return own


@pytest.mark.parametrize(
    ("attack", "ranks", "weights", "expected"),
    [
        ("sign-flip", (0, 2, 3), (), [0, 2, -1]),
        ("sign-flip:workers=2", (1, 2, 3), (), [1, -1, -1]),
        ("sign-flip", (2, 3, 4), (), [2, -3, 4]),
        ("sign-flip", (0, 1, 4), (), [0, 1, 4]),
        ("sign-flip", (2, 3, 4), (1.5, 1.5, 0.0), [2, -2, 4]),
        ("sign-flip", (2, 3, 4), (1.5, 0.0, 1.5), [2, 3, 4]),
        ("alie", (2, 3, 4), (1.5, 1.5, 0.0), [2, 3, 4]),
        ("model-replacement:workers=2", (0, 1, 3), (), [0, 1, 9]),
        ("model-replacement:workers=2", (0, 2, 3), (), [0, 3, 4.5]),
    ],
    ids=[
        "one of three",
        "two of three",
        "who joins is honest",
        "all hostile ones are gone",
        "who has joined just now sends nothing",
        "nor does a hostile one without samples",
        "too few are known",
        "a mean of three with one that is left",
        "a mean of three with two",
    ],
)
def test_who_is_hostile_is_said_by_rank(
    world: World, attack: str, ranks: tuple[int, ...], weights: tuple[float, ...], expected: list[float]
) -> None:
    """The last of four that the run began with, whoever is there."""
    found = world.run(sent, [attack], ranks, 4, weights)
    assert [float(each[0]) for each in found] == pytest.approx(expected)


def test_a_joiner_that_is_alone_yet_may_train_under_an_attack() -> None:
    context = context_of(AloneCollective(), (7,), num_first=4)
    assert under_attack(parse(["sign-flip"]), context, MEETING).hostility is not None
    own = torch.ones(2)
    under_attack(parse(["sign-flip"]), context, APART).corrupt([own], 0)
    assert torch.equal(own, torch.ones(2))
    named = replace(context, rank=3, membership=Membership(1, (3,)))
    under_attack(parse(["sign-flip"]), named, APART).corrupt([own], 0)
    assert torch.equal(own, -torch.ones(2))


@dataclass
class Rounds:
    """As of `Recovery`."""

    num_dealt: int


def noise(*, step: int, num_dealt: int | None) -> Tensor:
    recovery: Any = None if num_dealt is None else Rounds(num_dealt)
    context = replace(context_of(AloneCollective(), (1,), num_first=2), seed=5, recovery=recovery)
    own = torch.zeros(4, dtype=torch.float64)
    under_attack(parse(["gauss"]), context, APART).corrupt([own], step)
    return own


def test_noise_is_new_in_each_round_of_an_update_and_the_same_when_a_round_is_repeated() -> None:
    """The step stands still until an update of several rounds is complete."""
    first = noise(step=3, num_dealt=7)
    assert torch.equal(noise(step=3, num_dealt=7), first)
    assert not torch.equal(noise(step=3, num_dealt=8), first)
    assert not torch.equal(noise(step=4, num_dealt=7), first)
    generator = torch.Generator().manual_seed(derive(5, "attack", 1, 3))
    assert torch.equal(noise(step=3, num_dealt=None), torch.randn(4, dtype=torch.float64, generator=generator))
