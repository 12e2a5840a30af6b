"""The verdict's sentences, from studies whose answers are known."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline.cli import tables
from paceline.lab import runner, words
from paceline.lab.figures.chart import reached_in_part
from paceline.lab.summary_table import summary_table
from paceline.lab.virtual_cluster import VirtualCluster
from tests.lab.made import Combination, Made, reaching, study


def lines(directory: Path, trials: dict[Combination, Made], **settings: object) -> list[str]:
    return study(directory, trials, **settings).verdict.said


def test_the_fastest_the_cheapest_and_what_binds(tmp_path: Path) -> None:
    # One worker: 100 s. Ten: 25 s, 4 times. Twenty: 50 s, as most of it is waiting.
    trials = {}
    for seed, slowness in ((0, 1.0), (1, 1.1)):
        trials["ps-bsp:servers=2", 1, seed] = reaching(100.0)
        trials["ps-bsp:servers=2", 10, seed] = reaching(25.0 * slowness, shares=(0.8, 0.1, 0.1))
        trials["ps-bsp:servers=2", 20, seed] = reaching(50.0, shares=(0.2, 0.1, 0.7))
    assert lines(tmp_path / "s", trials) == [
        "Reach accuracy 0.5 fastest with ps-bsp:servers=2 on 10 workers: 26 s, 3.8 times one worker (3.6 to 4.0).",
        "Cheapest is one of 2: ps-bsp:servers=2 on 1 worker (100 worker-seconds and 200 server-seconds) and ps-bsp:"
        "servers=2 on 10 workers (262 worker-seconds and 52.5 server-seconds); chance may explain their differences.",
        "With ps-bsp:servers=2 past 10 workers the time rises: waiting for other workers binds, with 70 % "
        "of the workers' time, 10 % on 10 workers.",
    ]


def test_trials_beside_other_programs_are_named(tmp_path: Path) -> None:
    quiet = {("all-reduce", n, 0): reaching(100.0 / n, used_by_others=0.1) for n in (1, 2, 4)}

    def said(name: str, **used: float) -> list[str]:
        trials = {key: replace(made, used_by_others=used.get(f"on_{key[1]}", 0.1)) for key, made in quiet.items()}
        return [line for line in lines(tmp_path / name, trials) if line.startswith("Other programs")]

    assert said("quiet") == []
    assert said("beside", on_2=0.3, on_4=0.55) == [
        "Other programs kept up to 55 % of the machine busy as trials began, of all-reduce on 2 workers and all-reduce "
        "on 4 workers: their times mislead. Run the study again on a quiet machine."
    ]
    assert said("base", on_1=0.3) == [
        "Other programs kept up to 30 % of the machine busy as trials began, of all-reduce on 1 worker: their times "
        "mislead. What speed-ups are measured against is among them. Run the study again on a quiet machine."
    ]
    many = {("all-reduce", n, 0): reaching(100.0 / n, used_by_others=0.9) for n in range(1, 8)}
    (line,) = [line for line in lines(tmp_path / "many", many) if line.startswith("Other programs")]
    assert "all-reduce on 4 workers and 3 more: their" in line


def test_amdahls_law_describes_what_speeds_up(tmp_path: Path) -> None:
    """Fitted as far as 10 workers: f = 0.215 / 1.45 = 0.148, so at most 6.7 times, though 20 workers take 60 s."""
    curve = {1: 100.0, 5: 30.0, 10: 25.0, 20: 60.0}
    law = (
        "Up to 10 workers, all-reduce speeds up as if 15 % of the work were serial (Amdahl's law): "
        "at most 6.7 times one worker."
    )
    twice = {("all-reduce", n, seed): reaching(s) for n, s in curve.items() for seed in (0, 1)}
    assert law in lines(tmp_path / "one", twice)
    seeds = {
        ("all-reduce", n, seed): reaching(s * (1 + 0.1 * seed * (n > 1))) for n, s in curve.items() for seed in (0, 1)
    }
    assert any("past 10 workers the time rises" in line for line in lines(tmp_path / "rise", seeds))
    (with_bounds,) = [line for line in lines(tmp_path / "two", seeds) if "Amdahl" in line]
    assert re.search(r"as if 16 % \(15 % to 18 %\) of the work", with_bounds)


@pytest.mark.parametrize(
    "curve",
    [
        {1: 100.0, 2: 90.0, 4: 80.0, 8: 5.0},  # in proportion at last, and not before: no one fraction explains it
        {1: 100.0, 2: 10.0, 4: 5.0},  # far more than in proportion
        {1: 100.0, 2: 120.0, 4: 150.0},  # one worker is best
    ],
)
def test_amdahls_law_is_not_told_of_what_it_does_not_describe(tmp_path: Path, curve: dict[int, float]) -> None:
    trials = {("all-reduce", n, seed): reaching(s) for n, s in curve.items() for seed in (0, 1)}
    assert not any("Amdahl" in line for line in lines(tmp_path / "s", trials))


def test_a_tie_has_no_winner_in_words_nor_in_gold(tmp_path: Path) -> None:
    times = {"all-reduce": (10.0, 12.0, 11.0), "ps-bsp": (11.5, 11.0, 12.0), "ps-asp": (20.0, 23.0, 21.0)}
    trials = {(name, 2, seed): reaching(time_s) for name, own in times.items() for seed, time_s in enumerate(own)}
    made = study(tmp_path / "s", trials)
    said = made.verdict.lines
    assert said[:2] == [
        "No winner at accuracy 0.5: all-reduce on 2 workers (11 s) and ps-bsp on 2 workers (12 s); chance may explain "
        "their differences.",
        "Cheapest with all-reduce on 2 workers: 22 worker-seconds.",
    ]
    assert not any("fastest" in line for line in said)
    table = summary_table(made.frames, has_target=True, metric="accuracy", seconds="s")
    assert not any(shown["is_best"] for shown in table["rows"])
    assert [shown["cells"][0].text for shown in table["rows"]] == ["≈ all-reduce", "≈ ps-bsp", "ps-asp"]


def test_a_true_difference_is_found_with_two_seeds(tmp_path: Path) -> None:
    times = {("ps-asp", 4): (2.3, 3.8), ("ps-bsp", 4): (5.2, 5.7)}
    times |= {("all-reduce", n): (24.0 / n, 27.0 / n) for n in (1, 2, 3, 4)}
    trials = {(*arm, seed): reaching(time_s) for arm, own in times.items() for seed, time_s in enumerate(own)}
    assert lines(tmp_path / "s", trials)[0].startswith("Reach accuracy 0.5 fastest with ps-asp on 4 workers: 3.0 s")


def test_what_evaluations_cannot_tell_apart_is_a_tie(tmp_path: Path) -> None:
    """Evaluations are 2 s apart: 20.0 and 21.9 s are the same to them."""

    def said(name: str, other_s: float) -> str:
        times = {"all-reduce": 20.0, "ps-bsp": other_s}
        trials = {
            (strategy, 2, seed): Made([(8, time_s - 2.0, 80, 0.2), (10, time_s, 100, 0.6)], time_s=time_s)
            for strategy, time_s in times.items()
            for seed in range(3)
        }
        return lines(tmp_path / name, trials)[0]

    assert said("near", 21.9).startswith("No winner")
    assert said("far", 22.1).startswith("Reach accuracy 0.5 fastest with all-reduce on 2 workers")


def test_servers_are_paid_for(tmp_path: Path) -> None:
    """Two workers and two servers for 9 s cost 36, and two workers for 12 s cost 24."""
    trials = {("ps-bsp:servers=2", 2, seed): reaching(9.0 + 0.1 * seed) for seed in range(3)}
    trials |= {("all-reduce", n, seed): reaching(24.0 / n + 0.1 * seed) for n in (1, 2) for seed in range(3)}
    made = study(tmp_path / "s", trials)
    assert any(line.startswith("Cheapest is one of 2: all-reduce on 1 worker") for line in made.verdict.lines)
    rows = made.frames.summary.set_index(["strategy", "workers"])
    assert rows.loc[("ps-bsp:servers=2", 2), "cost_s_to_target"] == pytest.approx(36.4)
    assert rows.loc[("all-reduce", 2), "efficiency"] == pytest.approx(1.0, abs=0.02)
    assert rows.loc[("ps-bsp:servers=2", 2), "efficiency"] == pytest.approx(0.5)  # it is its own base: 2 of 4 processes


def test_how_far_apart_evaluations_are_is_said(tmp_path: Path) -> None:
    made = Made([(0, 0.0, 0, 0.1), (8, 8.0, 80, 0.2), (10, 10.0, 100, 0.6)])
    assert "A target is noticed at evaluations, here 2.0 s apart." in lines(tmp_path / "s", {("single", 1, 0): made})


def test_whose_spread_is_not_known_is_said(tmp_path: Path) -> None:
    trials = {("all-reduce", 1, seed): reaching(10.0 + seed) for seed in (0, 1)}
    trials["ps-bsp", 1, 0] = reaching(30.0)  # seed 1 has not been run yet
    said = lines(tmp_path / "s", trials)
    assert "One seed only of ps-bsp on 1 worker: it is taken to vary as others do." in said


def test_what_speedups_rest_on_is_said(tmp_path: Path) -> None:
    never = reaching(9.0, value=0.1)
    trials = {("ps-bsp", n, seed): reaching(s) for n, s in {1: 80.0, 2: 60.0}.items() for seed in range(3)}
    trials |= {("ps-bsp", n, 2): never for n in (1, 2)}  # no surer than the others
    trials |= {("ps-asp", 1, 0): reaching(40.0), ("ps-asp", 1, 1): never, ("ps-asp", 1, 2): reaching(50.0)}
    one = {("ps-asp", 2, 0): reaching(10.0), ("ps-asp", 2, 1): reaching(9.0), ("ps-asp", 2, 2): reaching(9.0)}
    assert "times one worker (4.0 to 5.6)" in lines(tmp_path / "two", {**trials, **one})[0]
    one["ps-asp", 2, 2] = never
    assert lines(tmp_path / "one", {**trials, **one})[0].endswith(
        "4.0 times one worker by the one seed that reached it in both."
    )
    one["ps-asp", 2, 0] = trials["ps-asp", 1, 2] = never
    one["ps-asp", 2, 2] = reaching(9.0)
    assert lines(tmp_path / "none", {**trials, **one})[0].endswith(
        "4.4 times one worker by the mean times, as no seed reached it in both."
    )


def test_a_crash_counts_as_a_seed_that_did_not_get_there(tmp_path: Path) -> None:
    crashed = reaching(1.0, failure="worker 1 died")
    trials = {("all-reduce", 2, seed): reaching(30.0) for seed in range(3)}
    trials |= {("ps-asp", 2, 0): reaching(5.0), ("ps-asp", 2, 1): crashed, ("ps-asp", 2, 2): crashed}
    made = study(tmp_path / "s", trials)
    said = made.verdict.lines
    assert said[0] == "Reach accuracy 0.5 fastest with all-reduce on 2 workers: 30 s."
    assert "ps-asp on 2 workers reached it in 1 of 3 seeds, there after 5.0 s." in said
    assert "Failed: ps-asp on 2 workers, seeds 1 and 2: worker 1 died." in said
    (note,) = reached_in_part(made.frames.summary)
    assert note == "ps-asp on 2 workers: the mean is of the 1 of 3 seeds that reached."
    table = summary_table(made.frames, has_target=True, metric="accuracy", seconds="s")
    assert [shown["is_best"] for shown in table["rows"]] == [True, False]
    console = Console(width=80, file=io.StringIO())
    console.print(tables.of_study(made.frames))
    assert "1/3" in console.file.getvalue()


def test_failures_are_counted_not_poured_out(tmp_path: Path) -> None:
    trials = {
        ("ps-asp", n, 0): reaching(1.0, failure=f"\n  \n{'x' * 300}\nTraceback" if n == 1 else f"worker {n} died.")
        for n in range(1, 12)
    }
    said = [line for line in lines(tmp_path / "s", trials) if line.startswith("Failed")]
    assert said[0] == f"Failed: ps-asp on 1 worker, seed 0: {'x' * 200} ...."
    assert len(said) == 9
    assert said[-1] == "Failed: 3 more trials."


def test_who_diverged_is_named(tmp_path: Path) -> None:
    trials = {("ps-asp", 1, seed): reaching(5.0, value=value) for seed, value in enumerate((0.5, math.inf, math.nan))}
    made = study(tmp_path / "s", trials)
    assert (
        made.verdict.lines[-1] == "Diverged: ps-asp on 1 worker, seeds 1 and 2: the last accuracy is no finite number."
    )
    assert made.frames.summary.loc[0, ["seeds", "reached"]].tolist() == [3, 1]


def test_virtual_time_is_said_to_be_virtual(tmp_path: Path) -> None:
    trials = {("ps-bsp", n, seed): reaching(100.0 / n + seed) for n in (1, 2) for seed in (0, 1)}
    virtual = {"engine": "virtual", "cluster": VirtualCluster.read("lab-1gbe")}
    said = lines(tmp_path / "s", trials, **virtual)
    assert said[0].startswith("Reach accuracy 0.5 fastest with ps-bsp on 2 workers: 50 s of virtual time, 2.0 times")
    assert any("101 virtual worker-seconds and 50.5 virtual server-seconds" in line for line in said)
    assert said[-1] == "Times are virtual, those of the simulated cluster lab-1gbe."
    untargeted = lines(tmp_path / "u", trials, target=None, **virtual)
    assert any(line.endswith(" samples/virtual s.") for line in untargeted)


def test_one_seed_has_no_spread_and_says_so(tmp_path: Path) -> None:
    trials = {("single", 1, 0): reaching(30.0), ("all-reduce", 1, 0): reaching(9, value=0.1)}
    said = lines(tmp_path / "s", {**trials, ("all-reduce", 2, 0): reaching(20.0)})
    assert said == [
        "No winner at accuracy 0.5; runs are too few to tell what is chance.",
        "Measured, the shortest first: all-reduce on 2 workers (20 s) and single on 1 worker (30 s).",
        "With more seeds the study says which is first, and why.",
        "Never reached accuracy 0.5: all-reduce on 1 worker (last 0.1; the script ended after 9.0 s).",
        "Ended too soon to tell whether it is slower: all-reduce on 1 worker.",
    ]


def test_one_seed_asserts_nothing_however_large_the_difference(tmp_path: Path) -> None:
    """Neither a gain, nor a cause, nor the cheapest: all of them would rest on one run each."""
    made = study(tmp_path / "s", {("all-reduce", n, 0): reaching(s) for n, s in {1: 93.0, 2: 3.0, 4: 60.0}.items()})
    said = " ".join(made.verdict.lines)
    assert said.startswith("No winner")
    for word in ("times", "fastest", "heapest", "binds", "Amdahl", "rises"):
        assert word not in said, word
    table = summary_table(made.frames, has_target=True, metric="accuracy", seconds="s")
    assert not any(shown["is_best"] for shown in table["rows"])


def test_a_gain_over_trials_beside_other_programs_is_not_told(tmp_path: Path) -> None:
    def said(name: str, **used: float) -> str:
        trials = {
            ("all-reduce", n, seed): reaching(100.0 / n + seed, used_by_others=used.get(f"on_{n}", 0.1))
            for n in (1, 2, 4)
            for seed in (0, 1)
        }
        return lines(tmp_path / name, trials)[0]

    told = said("quiet")
    assert told.endswith("on 4 workers: 26 s, 3.9 times one worker (3.9 to 4.0).")
    assert said("others", on_2=0.9) == told
    assert said("base", on_1=0.9) == said("own", on_4=0.9) == told.split(", 3.9")[0] + "."


def test_who_never_gets_there_is_named_and_never_wins(tmp_path: Path) -> None:
    trials = {
        ("all-reduce", 1, 0): reaching(30.0),
        ("all-reduce", 1, 1): reaching(30.0),
        ("ps-asp", 1, 0): reaching(5.0),
        ("ps-asp", 1, 1): reaching(9.0, value=0.4),
        ("ps-ssp", 1, 0): reaching(1.0, value=0.25),
        ("ps-ssp", 1, 1): reaching(1.0, value=0.35),
    }
    assert lines(tmp_path / "s", trials) == [
        "Reach accuracy 0.5 fastest with all-reduce on 1 worker: 30 s.",
        "It is also the cheapest: 30 worker-seconds.",
        "ps-asp on 1 worker reached it in 1 of 2 seeds, there after 5.0 s.",
        "Never reached accuracy 0.5: ps-ssp on 1 worker (last 0.3; the script ended after 1.0 s).",
        "Ended too soon to tell whether it is slower: ps-ssp on 1 worker.",
    ]


def test_the_best_that_is_there_where_nobody_is_sure(tmp_path: Path) -> None:
    trials = {("ps-asp", 1, seed): reaching(5.0, value=0.5 if seed else 0.1) for seed in range(3)}
    assert lines(tmp_path / "s", trials)[0] == (
        "Reach accuracy 0.5 fastest with ps-asp on 1 worker, in 2 of 3 seeds only: 5.0 s."
    )


def test_nobody_gets_there(tmp_path: Path) -> None:
    trials = {
        ("all-reduce", 1, 0): reaching(10.0, value=0.3, samples_per_step=50),
        ("all-reduce", 2, 0): reaching(10.0, value=0.4, samples_per_step=50),
    }
    assert lines(tmp_path / "s", trials) == [
        "No run reached accuracy 0.5.",
        "Best last accuracy: all-reduce on 2 workers (0.4) and all-reduce on 1 worker (0.3); runs are too few to tell "
        "what is chance.",
        "Most samples a second: all-reduce on 2 workers (100 samples/s) and all-reduce on 1 worker (50 samples/s); "
        "runs are too few to tell what is chance.",
    ]


def test_without_a_target(tmp_path: Path) -> None:
    said = lines(tmp_path / "s", {("all-reduce", 1, 0): reaching(10.0)}, target=None, max_steps=10)
    assert said[0] == "No target was set."
    assert "Best last accuracy with all-reduce on 1 worker: 0.5." in said


def test_failures_and_what_is_missing(tmp_path: Path) -> None:
    trials = {
        ("all-reduce", 1, 0): reaching(10.0),
        ("all-reduce", 2, 0): reaching(4.0, failure="worker 1 (process 7) died during step 3.\nTraceback"),
    }
    said = lines(tmp_path / "s", trials, seeds=(0, 1))
    assert said[-2:] == [
        "Failed: all-reduce on 2 workers, seed 0: worker 1 (process 7) died during step 3.",
        "2 of 4 trials have not been run yet.",
    ]
    assert said[0] == "accuracy 0.5 was reached by all-reduce on 1 worker: 10 s."


def test_nothing_has_finished(tmp_path: Path) -> None:
    said = lines(tmp_path / "s", {("single", 1, 0): reaching(1.0, failure="no")}, seeds=(0, 1))
    assert said == [
        "No trial has finished.",
        "Failed: single on 1 worker, seed 0: no.",
        "1 of 2 trials have not been run yet.",
    ]


def test_the_best_is_the_most_that_was_tried(tmp_path: Path) -> None:
    # As many samples a second from each of 2 workers, but twice the samples: larger batches teach less.
    trials = {
        ("all-reduce", n, seed): reaching(time_s, samples=samples, num_steps=steps)
        for n, time_s, samples, steps in ((1, 10.0, 1000, 10), (2, 9.0, 1800, 9))
        for seed in (0, 1)
    }
    assert (
        "With all-reduce from 1 to 2 workers, statistical efficiency binds: it takes 1.8 times the samples of "
        "1 worker; more were not tried."
    ) in lines(tmp_path / "s", trials)


def test_a_time_that_may_not_have_risen_is_not_said_to_rise_nor_to_fall(tmp_path: Path) -> None:
    times = {(2, 0): 10.0, (2, 1): 14.0, (4, 0): 12.0, (4, 1): 13.0}
    said = lines(tmp_path / "s", {("all-reduce", *key): reaching(time_s) for key, time_s in times.items()})
    (line,) = [line for line in said if "past 2 workers" in line]
    assert line.startswith("With all-reduce past 2 workers the time does not fall: ")
    assert "in proportion" not in line


@given(st.floats(1e-6, 1e6))
def test_durations_are_said_to_three_digits(value_s: float) -> None:
    said = words.seconds(value_s)
    units = {"h": 3600, "min": 60, "s": 1}
    parts = said.replace(",", "").split()
    total_s = sum(float(number) * units[unit] for number, unit in zip(parts[::2], parts[1::2], strict=True))
    assert total_s == pytest.approx(value_s, rel=0.06)


def test_the_rest_of_a_study_is_estimated_from_what_has_ended(tmp_path: Path) -> None:
    made = study(
        tmp_path / "s",
        {
            ("single", 1, 0): reaching(7.0),
            ("all-reduce", 1, 0): reaching(17.0),
            ("ps-bsp", 1, 0): reaching(1.0, failure="x"),
        },
        seeds=(0, 1),
    )
    done = runner.outcomes(made.directory, made.spec.trials)
    left = [trial for trial in made.spec.trials if trial not in done]
    # Wall times are 10 s and 20 s; the strategy that failed is taken to be as the mean, 15 s.
    assert runner.estimate_left_s(left, done) == pytest.approx(10 + 20 + 15)
    assert runner.estimate_left_s(left, {}) is None
