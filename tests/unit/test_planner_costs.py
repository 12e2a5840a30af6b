"""Closed forms, order statistics and the noise scale, against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.description import Compute
from paceline.engines.virtual.server import update_bytes
from paceline.planner import costs
from paceline.planner.noise import NoiseScale, NoiseSums, steps_ratio
from paceline.planner.stragglers import Group, StepTimes, expected_s

B = 125e6  # bytes per second of 1 Gb/s
M = 100e6  # bytes: 0.8 s through one card


def test_exchanges_by_hand() -> None:
    assert costs.ring_s(4, M, bytes_per_s=B, latency_s=0.01) == pytest.approx(6 * (0.2 + 0.01))
    assert costs.halving_doubling_s(8, M, bytes_per_s=B, latency_s=0.01) == pytest.approx(2 * 0.7 + 6 * 0.01)
    assert costs.halving_doubling_s(5, M, bytes_per_s=B) == pytest.approx(2 * 0.6 + 2 * 0.8)
    assert costs.reduce_broadcast_s(3, M, bytes_per_s=B) == pytest.approx(3.2)
    assert costs.reduce_broadcast_s(3, M, bytes_per_s=B, piece_bytes=M / 100) == pytest.approx(1.6 + 0.016)
    assert costs.all_to_all_s(4, M, bytes_per_s=B, latency_s=0.01) == pytest.approx(1.2 + 0.02)


@given(st.integers(2, 100))
def test_what_theory_says_is_equal(n: int) -> None:
    """Direct exchange costs what a ring does."""
    assert costs.all_to_all_s(n, M, bytes_per_s=B) == pytest.approx(costs.ring_s(n, M, bytes_per_s=B))


def test_messages_one_after_the_other_by_hand() -> None:
    """Three messages of 2 s. Posting one takes 1 s, and the card is what is waited for; or 5 s, and it is posting."""
    assert costs.burst_s(3, each_s=2.0, message_s=1.0) == 1 + 3 * 2
    assert costs.burst_s(3, each_s=2.0, message_s=5.0) == 3 * 5 + 2
    assert costs.reduce_broadcast_s(3, 0.001, bytes_per_s=B, message_s=1.0) == pytest.approx(1 + 2)
    assert costs.all_to_all_s(3, 0.001, bytes_per_s=B, latency_s=0.5, message_s=1.0) == pytest.approx(2 * (2 + 0.5))


def test_pipelines_and_queues_by_hand() -> None:
    assert costs.pipeline_s([1.0, 3.0, 2.0], 4) == 6 + 3 * 3
    assert costs.pipeline_s([1.0, 3.0, 2.0], 1) == 6
    # Ready at 0, 1 and 5, two seconds each: the last begins at 5.
    assert costs.queue_ends_s([0.0, 1.0, 5.0], [2.0, 2.0, 2.0]) == [2.0, 4.0, 7.0]
    assert costs.queue_ends_s([0.0, 1.0, 1.0], [2.0, 2.0, 2.0]) == [2.0, 4.0, 6.0]
    # Four gradients, their mean read and written once each beside them, parameters, and momentum both ways.
    assert update_bytes(4, 10.0, 10.0) == (4 + 2 + 2) * 10 + 20
    assert update_bytes(1, 10.0, 0.0) == 30


def test_asynchronous_rate_by_hand() -> None:
    """Two workers, Z = 3 and D = 1: R(1) = 1, Q(1) = 1/4, R(2) = 5/4, X(2) = 2 / (17/4)."""
    assert costs.asynchronous_rate(2, cycle_s=3.0, own_s=1.0, shared_s=1.0) == pytest.approx(8 / 17)
    # A card that takes twice what is shared: half of the transfer is a delay.
    assert costs.asynchronous_rate(2, cycle_s=2.0, own_s=2.0, shared_s=1.0) == pytest.approx(8 / 17)
    # What is shared is slower than a card: many workers get what it gives, 1 / D.
    assert costs.asynchronous_rate(100, cycle_s=1.0, own_s=1.0, shared_s=4.0) == pytest.approx(1 / 4)
    # Two queues of 1 s, behind 1 s: each has 1/3 of one worker, so that two take 4/3 s in each.
    assert costs.asynchronous_rate(2, cycle_s=1.0, own_s=1.0, shared_s=1.0, other=(1.0, 1.0)) == pytest.approx(6 / 11)


def test_a_link_is_late_where_it_is_asked_for_more_than_it_can_pass() -> None:
    """Two workers, 2 s besides, and a trip of 1 s each way, on which one meets the other's way back with a chance of
    1/4."""
    way, back = costs.Trip(1.0, 1.0, 1.0, meets=1), costs.Trip(1.0, 1.0, 1.0, meets=0)
    rate = costs.asynchronous_rate(2, cycle_s=2.0, own_s=0.0, shared_s=0.0, trips=(way, back))
    assert rate == pytest.approx(2 / (2 + 2 * 1.25))
    # Half of a link each: two workers never wait, and three do if both others are there, with a chance of 1/16.
    half = costs.Trip(1.0, 0.5, 0.5, meets=0)
    assert half.expected_s(1, 0.25) == pytest.approx(1.0)
    assert half.expected_s(2, 0.25) == pytest.approx(1 + 0.5 / 16)
    assert [half.expected_s(3, chance) for chance in (0.0, 1.0)] == pytest.approx([1.0, 2.0])


@given(st.integers(0, 2000), st.floats(0.0, 1.0), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_a_trip_keeps_its_bounds(num_others: int, chance: float, use: float, each: float) -> None:
    """It takes its own time at least, and what all together ask for on the average (Jensen)."""
    found_s = costs.Trip(1.0, use, each, meets=0).expected_s(num_others, chance)
    asked = use + each * num_others * chance
    assert found_s >= max(1.0, asked) * (1 - 1e-9)
    assert found_s <= 1 + each * num_others * chance + 1e-9


@given(st.integers(1, 200), st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.001, 10))
def test_asynchronous_rate_keeps_its_bounds(n: int, cycle_s: float, own_s: float, shared_s: float) -> None:
    rate = costs.asynchronous_rate(n, cycle_s=cycle_s, own_s=own_s, shared_s=shared_s)
    alone_s = cycle_s + max(own_s, shared_s)
    assert rate <= min(n / alone_s, 1 / shared_s) * (1 + 1e-9)
    assert rate >= n / (alone_s + (n - 1) * shared_s) * (1 - 1e-9)


# --- stragglers ------------------------------------------------------------------------------------------------------


def times(mean_s: float = 1.0, **compute: object) -> StepTimes:
    return StepTimes(Compute(step_s=mean_s, **compute), mean_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
def test_the_slowest_of_exponential_steps_takes_harmonic_numbers(n: int) -> None:
    harmonic = sum(1 / k for k in range(1, n + 1))
    assert expected_s([Group(times(distribution="exponential"), n)]) == pytest.approx(harmonic, rel=1e-3)


@pytest.mark.parametrize("left_out", [1, 2, 3])
def test_backup_workers_take_terms_off_the_harmonic_number(left_out: int) -> None:
    expected = sum(1 / k for k in range(left_out + 1, 9))
    found = expected_s([Group(times(distribution="exponential"), 8)], left_out=left_out)
    assert found == pytest.approx(expected, rel=1e-3)


def test_discrete_times_by_hand() -> None:
    """Of 1 s and 3 s alike: the slower of two is 3 s three times of four, the quicker one of four."""
    trace = times(2.0, distribution="trace", trace_s=(1.0, 3.0))
    assert expected_s([Group(trace, 2)]) == pytest.approx(2.5)
    assert expected_s([Group(trace, 2)], left_out=1) == pytest.approx(1.5)
    assert expected_s([Group(times(2.0), 5)]) == pytest.approx(2.0)


def test_slow_hosts_are_left_out_by_backup_workers() -> None:
    groups = [Group(times(1.0), 3), Group(times(5.0), 1)]
    assert expected_s(groups) == pytest.approx(5.0)
    assert expected_s(groups, left_out=1) == pytest.approx(1.0)


def test_pauses_come_on_top() -> None:
    """0.01 a second, of 2 s: in a step of 2 s the mean of a Poisson number of them, 0.04 s."""
    paused = times(2.0, pauses_per_hour=36.0, pause_s=2.0)
    assert paused.expected_s == pytest.approx(2.04)
    assert expected_s([Group(paused, 1)]) == pytest.approx(2.04, rel=1e-4)


@given(st.integers(1, 60), st.floats(0.01, 1.0))
def test_the_slowest_of_log_normal_steps_is_what_draws_are(n: int, variation: float) -> None:
    """Monte Carlo with 2000 rows: four standard errors of a maximum whose deviation is below that of twice one draw."""
    steps = times(distribution="log-normal", variation=variation)
    drawn = steps.at(np.random.default_rng(n).random((2000, n))).max(axis=1)
    assert expected_s([Group(steps, n)]) == pytest.approx(drawn.mean(), abs=4 * 2 * drawn.std() / math.sqrt(2000))


# --- noise -----------------------------------------------------------------------------------------------------------


def test_noise_scale_of_a_known_gradient() -> None:
    """G = (3, 4), of samples with covariance 2 I in 2 dimensions: tr / |G|^2 = 4 / 25."""
    generator = torch.Generator().manual_seed(0)
    sums = NoiseSums()
    for _ in range(4000):
        samples = torch.tensor([3.0, 4.0]) + 2**0.5 * torch.randn(8, 2, generator=generator)
        sums.add([samples.mean(dim=0)[:1], samples.mean(dim=0)[1:]])
    assert sums.scale(batch=8).samples == pytest.approx(4 / 25, rel=0.1)


def test_noise_scale_without_noise_and_without_gradient() -> None:
    still, lost = NoiseSums(), NoiseSums()
    for sign in (1.0, -1.0):
        still.add([torch.ones(3)])
        lost.add([torch.full((3,), sign)])
    assert still.scale(batch=4).samples == 0.0
    assert lost.scale(batch=4).samples == math.inf


def test_steps_by_hand() -> None:
    """Equation 2.7 with a scale of 90: batches of 10 take 10 times the least number of steps, of 90 twice."""
    noise = NoiseScale(90.0)
    assert steps_ratio(noise, batch=90, base_batch=10) == pytest.approx(0.2)
    assert steps_ratio(NoiseScale(math.inf), batch=90, base_batch=10) == pytest.approx(1 / 9)


@given(st.floats(0.1, 1e6), st.integers(1, 1000), st.integers(1, 1000))
def test_late_gradients_are_worth_what_their_mean_is(scale: float, batch: int, n: int) -> None:
    """n updates that are n - 1 late get as far as one with the mean of as many gradients."""
    noise = NoiseScale(scale)
    late = noise.steps(batch, staleness=n - 1)
    assert late / n == pytest.approx(noise.steps(n * batch))
