"""Servers with copies die between any two messages while pushes to them are coded: what counts is what a worker's codec
has sent, once, and what that has left out is owed until it is sent, also where another server is on another host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.codec import TensorCodec
from paceline.codec.base import Payload, Shape
from paceline.server.coded_push import PushCoding
from paceline.server.spec import Push
from tests.covering import in_turns
from tests.unit import outlived_copies as outlived
from tests.unit.outlived_copies import JOINER, NUM_WORKERS, POINTS, STEPS, WITH_A_SERVER, Places
from tests.unit.replicated_servers import (
    DEATHS,
    HOSTS,
    LAYOUT,
    NUM_ELEMENTS,
    NUM_STEPS,
    PLACES,
    PLAIN,
    SEEDS,
    TWO_DEATHS,
    Death,
    Net,
)
from tests.unit.test_coded_pushes_outlived import Coarse

QUICK = settings(max_examples=10, deadline=None)
TOTAL = 2.0 ** (3 * NUM_STEPS) - 1
"""Of all gradients, each of which is a power of two."""


@dataclass(frozen=True, kw_only=True)
class Drawn(TensorCodec):
    """Adds what follows from the seed alone, which is as much on both sides, or the model would show it."""

    seconds_per_gbyte: ClassVar[tuple[float, float]] = 0.0, 0.0
    linear: ClassVar[bool] = True

    @property
    def feedback(self) -> bool:
        return False

    def num_bytes(self, shape: Shape) -> int:
        return 8 * torch.Size(shape).numel()

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        return (tensor.double() + seed % 1000,)

    def decode(self, payload: Payload, like: Tensor, *, seed: int) -> Tensor:
        return (payload[0] - seed % 1000).to(like.dtype).view(like.shape)


def codings(num_workers: int, *, beside: bool, codec: TensorCodec | None = None) -> list[PushCoding]:
    lefts = [torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8) for _ in range(num_workers)]
    return [
        PushCoding(codec or Coarse(), seed=0, left=left if codec is None else None, beside=beside) for left in lefts
    ]


def trained(
    rule: str,
    hosts: str,
    deaths: Sequence[Death],
    seed: int,
    coding: Sequence[PushCoding],
    *,
    replicas: int = 1,
    is_exact: bool = True,
) -> Net:
    about = {"num_workers": 3, "hosts": HOSTS[hosts], "replicas": replicas, "spec": PLAIN, "seed": seed}
    net = Net(rule, deaths=deaths, coding=coding, **about)
    net.train(NUM_STEPS, is_exact=is_exact)
    net.assert_copies_are_equal()
    return net


def owed(net: Net, coding: Sequence[PushCoding]) -> list[list[Tensor]]:
    """By key range, for each tensor of its server's what all workers owe together."""
    lefts = [each.left for each in coding if each.left is not None]
    return [
        [sum(piece.view(LAYOUT, left) for left in lefts) for part in net.parts_of(key_range) for piece in part.pieces]
        for key_range in range(len(net.chains.chains))
    ]


def assert_all_is_sent_or_owed(
    rule: str, hosts: str, deaths: Sequence[Death], seed: int, *, beside: bool, replicas: int
) -> None:
    coding = codings(3, beside=beside)
    net = trained(rule, hosts, deaths, seed, coding, replicas=replicas)
    found = 0
    for parameters, lefts in zip(net.heads_parameters(), owed(net, coding), strict=True):
        for parameter, left in zip(parameters, lefts, strict=True):
            values = (left - parameter)[parameter != 0]
            assert values.tolist() == [TOTAL] * len(values)
            found += len(values)
    assert found == NUM_ELEMENTS, "and 0 where nothing lies"


@QUICK
@given(rule=st.sampled_from(["asp", "ssp"]), death=DEATHS, hosts=PLACES, seed=SEEDS, beside=st.booleans())
def test_what_is_left_out_is_owed_whichever_server_dies(
    rule: str, death: Death, hosts: str, seed: int, beside: bool
) -> None:
    assert_all_is_sent_or_owed(rule, hosts, [death], seed, beside=beside, replicas=1)


@QUICK
@given(rule=st.sampled_from(["asp", "ssp"]), deaths=TWO_DEATHS, hosts=PLACES, seed=SEEDS, beside=st.booleans())
def test_two_replicas_owe_nothing_twice(rule: str, deaths: list[Death], hosts: str, seed: int, beside: bool) -> None:
    assert_all_is_sent_or_owed(rule, hosts, deaths, seed, beside=beside, replicas=2)


@functools.cache
def undisturbed() -> list[list[Tensor]]:
    return trained("bsp", "one host", [], 0, codings(3, beside=True), is_exact=False).heads_parameters()


@QUICK
@given(deaths=TWO_DEATHS, hosts=PLACES, seed=SEEDS)
def test_bsp_is_the_undisturbed_run_where_all_that_is_pushed_is_coded(
    deaths: list[Death], hosts: str, seed: int
) -> None:
    net = trained("bsp", hosts, deaths, seed, codings(3, beside=True), replicas=2, is_exact=False)
    for own, expected in zip(net.heads_parameters(), undisturbed(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


@QUICK
@given(death=DEATHS, hosts=PLACES, seed=SEEDS, beside=st.booleans())
def test_what_is_pushed_again_is_decoded_with_the_draws_that_it_was_coded_with(
    death: Death, hosts: str, seed: int, beside: bool
) -> None:
    trained("asp", hosts, [death], seed, codings(3, beside=beside, codec=Drawn())).assert_each_gradient_counted()


@pytest.mark.parametrize(("victim", "hosts"), in_turns(sorted(HOSTS), (2, 0, 1)))
def test_a_death_after_any_message(hosts: str, victim: int) -> None:
    for num_sent in range(1, 60):
        death = Death(victim, num_sent, num_sent % 3)
        assert_all_is_sent_or_owed("asp", hosts, [death], num_sent, beside=num_sent % 2 == 0, replicas=1)


# --- and workers that die, and join --------------------------------------------------------------------------------


class CodedNet(outlived.Net):
    def __init__(self, rule: str, places: Places, *, beside: bool, **about: Any) -> None:
        self.coding = codings(NUM_WORKERS + 1, beside=beside)
        super().__init__(rule, places, coding=self.coding, **about)

    def push(self, worker: int, value: float, push: Push) -> None:
        for gradient in LAYOUT.views(self.buffers[worker][1]):
            gradient.fill_(value)
        self.clients[worker].encode(push)
        self.ask(worker, self.clients[worker].exchange(push))


def sent_at(worker: int, step: int) -> float:
    """What goes of a worker's gradient where all that is pushed is coded."""
    before, after = (sum(outlived.value_of(worker, each) for each in range(end)) for end in (step, step + 1))
    return float(after // 4 * 4 - before // 4 * 4)


def require_all_is_sent_or_owed(
    rule: str,
    places: str,
    deaths: Sequence[Death],
    *,
    replicas: int,
    seed: int,
    dies_after: int | None,
    joins_after: int | None,
    lives_on: bool = False,
) -> None:
    """Of a worker that dies nobody knows what it owed, but where all is coded."""
    beside = dies_after is not None or seed % 2 == 0
    net = CodedNet(rule, outlived.PLACES[places], replicas=replicas, deaths=deaths, seed=seed, beside=beside)
    training = outlived.Training(net, dead=None if dies_after is None else seed % NUM_WORKERS, lives_on=lives_on)
    training.run(dies_after=dies_after, joins_after=joins_after)
    by_clock: dict[int, dict[int, float]] = {}
    for worker in range(NUM_WORKERS + training.has_joined):
        num = training.done.own if training.has_died and worker == training.dead else STEPS
        first = training.begins if worker == JOINER else 0
        for step in range(num):
            value = sent_at(worker, step) if beside else outlived.value_of(worker, step)
            by_clock.setdefault(first + step, {})[worker] = value
    total = sum(sum(each.values()) / (len(each) if rule == "bsp" else 1) for each in by_clock.values())
    lefts = owed(net, [] if beside else net.coding)
    for key_range, parameters in enumerate(net.heads_parameters()):
        for number, parameter in enumerate(parameters):
            values = -parameter if beside else lefts[key_range][number] - parameter
            values = values[parameter != 0]
            assert values.tolist() == pytest.approx([total] * len(values), rel=1e-6)
    net.assert_copies_are_equal()
    for worker in training.acting if beside else ():
        whole = sum(outlived.value_of(worker, step) for step in range(STEPS))
        left = net.coding[worker].left
        assert left is not None
        assert {float(each) for view in LAYOUT.views(left) for each in view} <= {0.0, float(whole % 4)}


@settings(max_examples=20, deadline=None)
@given(
    rule=st.sampled_from(["asp", "ssp", "bsp"]),
    places=st.sampled_from(sorted(outlived.PLACES)),
    death=DEATHS,
    seed=st.integers(0, 2**32),
    dies_after=POINTS,
    joins_after=st.none() | POINTS,
    lives_on=st.booleans(),
)
def test_a_worker_and_a_server_die(
    rule: str, places: str, death: Death, seed: int, dies_after: int, joins_after: int | None, lives_on: bool
) -> None:
    require_all_is_sent_or_owed(
        rule, places, [death], replicas=1, seed=seed, dies_after=dies_after, joins_after=joins_after, lives_on=lives_on
    )


@settings(max_examples=15, deadline=None)
@given(
    rule=st.sampled_from(["asp", "ssp"]),
    places=st.sampled_from(sorted(outlived.PLACES)),
    deaths=TWO_DEATHS,
    seed=st.integers(0, 2**32),
    joins_after=st.none() | POINTS,
)
def test_a_worker_joins_and_two_servers_die(
    rule: str, places: str, deaths: list[Death], seed: int, joins_after: int | None
) -> None:
    require_all_is_sent_or_owed(rule, places, deaths, replicas=2, seed=seed, dies_after=None, joins_after=joins_after)


@pytest.mark.parametrize(("victim", "places"), in_turns(sorted(outlived.PLACES), (2, 0, 1)))
def test_a_worker_dies_with_a_server_after_any_of_its_messages(places: str, victim: int) -> None:
    for num_sent in range(1, 60):
        for seed in range(2):
            rule = ("asp", "ssp", "bsp")[(num_sent + seed) % 3]
            death = Death(victim, num_sent, num_lost=num_sent // 3 % 3)
            require_all_is_sent_or_owed(
                rule, places, [death], replicas=1, seed=seed, dies_after=WITH_A_SERVER, joins_after=None
            )
