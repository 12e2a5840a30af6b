"""What chance explains: traps whose answers are known, and how often studies of nothing but noise name a winner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paceline.lab import chance
from paceline.lab.chance import Arm, Run, compare

A, B, C = ("all-reduce", 2), ("ps-bsp", 2), ("ps-asp", 2)


def runs_of(values: Mapping[Arm, Sequence[float]]) -> list[Run]:
    """A value a seed; one that is negative was not reached until then."""
    return [Run(arm, seed, abs(v), v > 0) for arm, own in values.items() for seed, v in enumerate(own)]


def may_be_best(runs: Sequence[Run], noticed: float = 0.0) -> set[Arm]:
    found = compare(runs)
    return found.may_be_best(among=found.arms, noticed=noticed)


def simulated(seed: int, *, num_arms: int, num_seeds: int, spread: float, lead: float = 0.0) -> list[Run]:
    """Arms whose runs share their seeds' luck; the first arm leads."""
    random = np.random.default_rng(seed)
    luck = random.normal(0, 0.3, num_seeds)
    noise = random.normal(0, spread, (num_arms, num_seeds))
    return [
        Run(("arm", arm), block, float(luck[block] + noise[arm, block] - lead * (arm == 0)))
        for arm in range(num_arms)
        for block in range(num_seeds)
    ]


def test_two_arms_are_the_paired_t_test() -> None:
    values = {A: [1.0, 1.4, 2.0, 2.3], B: [1.3, 1.6, 2.4, 2.5]}
    differences = np.subtract(values[B], values[A])
    error = differences.std(ddof=1) / math.sqrt(4)
    found = compare(runs_of(values))
    assert found.freedom == 3
    assert found.centres[1] - found.centres[0] == pytest.approx(differences.mean())
    assert found.margins[1, 0] == pytest.approx(stats.t.ppf(0.95, 3) * error, rel=0.03)


def test_many_arms_are_dunnetts_test() -> None:
    """Dunnett, JASA 50 (1955), table 1a: five comparisons with a control, one-sided 95 %, 20 degrees of freedom."""
    found = compare(simulated(0, num_arms=6, num_seeds=5, spread=0.05))
    assert found.freedom == 20
    assert found.margins[0, 1] / (found.spread * math.sqrt(2 / 5)) == pytest.approx(2.40, abs=0.04)


def test_an_unpaired_tie_is_a_difference_once_seeds_are_paired() -> None:
    """Seeds differ by a factor of 3, and arms by a tenth with every seed: taken alone, the arms overlap."""
    seeds = np.log([10.0, 17.0, 30.0])
    values = {A: seeds, B: np.add(seeds, [0.10, 0.11, 0.12]), C: np.add(seeds, [0.2, 0.21, 0.19])}
    assert stats.ttest_ind(values[A], values[B]).pvalue > 0.8
    assert may_be_best(runs_of(values)) == {A}


def test_two_seeds_tell_a_true_difference_since_all_arms_tell_the_spread() -> None:
    """3.1 s (2.3 to 3.8) and 5.5 s (5.2 to 5.7), beside four other arms of two seeds each."""
    pair = {A: np.log([2.3, 3.8]), B: np.log([5.2, 5.7])}
    assert may_be_best(runs_of(pair)) == {A, B}
    others = {("local", n): np.log([6.0 * n, 6.9 * n]) for n in (1, 2, 3, 4)}
    assert may_be_best(runs_of({**pair, **others})) == {A}


def test_nothing_is_known_of_chance_from_one_seed() -> None:
    found = compare(runs_of({A: [1.0], B: [5.0]}))
    assert found.may_be_best(among={A, B}) == {A, B}
    assert math.isnan(found.spread)


def test_arms_without_a_common_seed_are_not_compared() -> None:
    runs = [Run(A, 0, 1.0), Run(A, 0, 1.01), Run(A, 0, 0.99), Run(B, 1, 9.0), Run(B, 1, 9.01)]
    assert may_be_best(runs) == {A, B}


def test_what_nobody_would_notice_is_a_tie() -> None:
    runs = runs_of({A: [1.0, 1.0, 1.0], B: [1.05, 1.05, 1.05]})
    assert may_be_best(runs) == {A}
    assert may_be_best(runs, noticed=0.06) == {A, B}


def test_a_run_that_never_arrived_counts_as_late() -> None:
    """Of those that arrived, B is the faster; two of its five seeds had not after twice the time."""
    values = {A: [1.0, 1.1, 0.9, 1.0, 1.05], B: [0.9, 1.0, 0.8, -1.7, -1.7], C: [3.0, 3.1, 2.9, 3.0, 3.05]}
    found = compare(runs_of(values))
    centre = dict(zip(found.arms, found.centres, strict=True))
    assert centre[B] > centre[A]
    assert centre[C] == pytest.approx(3.01, abs=0.05)


def test_a_censored_fit_recovers_what_made_the_runs() -> None:
    """400 seeds of three arms, of which what takes longer than 1.3 is cut off: a third, most of the slowest."""
    random = np.random.default_rng(3)
    true = {A: 1.0, B: 1.2, C: 1.4}
    made = {arm: random.normal(mean, 0.2, 400) for arm, mean in true.items()}
    # No blocks: each run is of one seed, as what hundreds of seeds share is not what is asked here.
    runs = [Run(arm, 0, min(float(v), 1.3), v < 1.3) for arm, values in made.items() for v in values]
    found = compare(runs)
    assert found.centres == pytest.approx(list(true.values()), abs=0.04)
    assert found.spread == pytest.approx(0.2, abs=0.02)
    errors = np.sqrt(np.diag(found.covariance)) * found.spread
    assert (errors >= 0.2 / math.sqrt(400) * 0.99).all()


def test_a_run_that_ended_at_once_tells_nothing() -> None:
    values = {A: [1.0, 1.1, 0.9], B: [1.5, 1.6, 1.45]}
    whole, cut = compare(runs_of(values)), compare([*runs_of(values), Run(B, 3, -9.0, False), Run(C, 0, 0.1, False)])
    assert cut.arms == whole.arms
    assert cut.centres == pytest.approx(whole.centres)
    assert cut.margins == pytest.approx(whole.margins)


@given(st.integers(0, 10**6), st.floats(-3, 3), st.floats(0.1, 10))
def test_units_change_nothing(seed: int, shift: float, scale: float) -> None:
    runs = simulated(seed, num_arms=3, num_seeds=3, spread=0.1, lead=0.1)
    other = [Run(run.arm, run.seed, shift + scale * run.value) for run in runs]
    assert may_be_best(other) == may_be_best(runs)
    assert compare(other).margins == pytest.approx(scale * compare(runs).margins)


def test_nothing_at_all() -> None:
    assert compare([]).arms == ()
    assert compare([Run(A, 0, 1.0, False)]).arms == ()
    assert may_be_best([Run(A, 0, 1.0)]) == {A}


@pytest.mark.parametrize("num_studies", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_twenty_arms_of_noise_name_a_winner_in_at_most_one_study_of_twenty(num_studies: int) -> None:
    winners, lost = 0, 0
    for seed in range(num_studies):
        left = may_be_best(simulated(seed, num_arms=20, num_seeds=3, spread=0.05))
        winners += len(left) == 1
        lost += ("arm", 0) not in left  # any of them may be taken for the best
    assert winners <= 0.05 * num_studies
    assert lost <= 0.05 * num_studies + 3 * math.sqrt(0.05 * 0.95 * num_studies)


@pytest.mark.parametrize("num_studies", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_one_of_six_that_is_15_percent_faster_is_found(num_studies: int) -> None:
    studies = [
        simulated(seed, num_arms=6, num_seeds=5, spread=0.05, lead=math.log(1.15)) for seed in range(num_studies)
    ]
    assert sum(may_be_best(runs) == {("arm", 0)} for runs in studies) >= 0.8 * num_studies


def test_the_same_runs_say_the_same() -> None:
    runs = simulated(1, num_arms=5, num_seeds=3, spread=0.1)
    first = compare(runs).margins
    chance._critical_values.cache_clear()
    assert (compare(runs).margins == first).all()
