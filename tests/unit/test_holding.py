"""When a target counts as reached: by rule, in runs, and in a study's tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import paceline
from paceline.config import RunConfig, Target, in_order
from paceline.errors import UsageError
from paceline.lab.summary_table import summary_table
from paceline.training.holding import MOST, Streak, evaluations_needed
from tests.lab.made import Made, study

ACCURACY = Target.parse("accuracy=0.5")
TOUCHED = (0.1, 0.52, 0.4, 0.51, 0.53, 0.55, 0.56)
"""Reached by luck at the second evaluation, and for good at the fourth."""


@given(st.integers(10, 100_000), st.floats(0.05, 0.95))
def test_as_few_evaluations_as_luck_rarely_passes(num_samples: int, value: float) -> None:
    target = Target("accuracy", value, rising=True)
    short = value - (value * (1 - value) / num_samples) ** 0.5
    passes = stats.binom.sf(-(-(value * num_samples - 1e-9) // 1) - 1, num_samples, max(short, 0.0))
    needed = evaluations_needed(target, num_samples)
    assert needed == MOST or passes**needed < 0.05
    assert needed == 1 or passes ** (needed - 1) >= 0.05


def test_of_what_is_no_share_of_samples_nothing_is_known() -> None:
    for text in ("loss=0.3", "perplexity=20", "accuracy=90"):
        assert evaluations_needed(Target.parse(text), 10_000) == 1
    assert evaluations_needed(Target.parse("error=0.1"), 10_000) == 2
    assert evaluations_needed(ACCURACY, None) == 1


def test_a_streak_begins_anew_after_a_miss() -> None:
    streak = Streak(ACCURACY, 2)
    held = [streak.add({"accuracy": value}, float(time_s)) for time_s, value in enumerate(TOUCHED)]
    assert held == [False, False, False, False, True, True, True]
    assert streak.began_s == 3.0


def test_the_hardest_target_is_the_last() -> None:
    targets = [Target.parse(text) for text in ("accuracy=0.6", "accuracy=0.5")]
    assert in_order(targets) == targets[::-1]
    mixed = [Target.parse(text) for text in ("loss=0.1", "accuracy=0.5")]
    assert in_order(mixed) == mixed


@pytest.mark.parametrize("settings", [{"hold": 0}, {"after_target": "pause"}])
def test_settings_out_of_range_are_named(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings)).replace("_", "-")):
        RunConfig(**settings)  # type: ignore[arg-type]


def touching(num_samples: int | None = None) -> None:
    """A script whose evaluations return TOUCHED, then 0.6."""
    worker = paceline.init()
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 2)), batch_size=4)
    model, optimizer, data = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
    values = iter(TOUCHED)
    more = {} if num_samples is None else {"num_samples": num_samples}
    worker.evaluation(lambda model: {"accuracy": next(values, 0.6), **more})
    for (inputs,) in data:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()


def of_many_samples() -> None:
    touching(10_000)


@pytest.mark.parametrize(
    ("script", "settings", "reached_at", "ended_at"),
    [
        (touching, {}, 1, 1),
        (touching, {"hold": 2}, 3, 4),
        (of_many_samples, {}, 3, 4),
        (of_many_samples, {"hold": 1}, 1, 1),
        (touching, {"hold": 2, "after_target": "continue"}, 3, 16),
        (touching, {"hold": 20}, None, 16),
    ],
)
def test_a_run_ends_once_its_target_is_held(
    tmp_path: Path, script: object, settings: dict[str, object], reached_at: int | None, ended_at: int
) -> None:
    result = paceline.run(
        script, strategy="single", engine="virtual", cluster="lab-1gbe", target="accuracy=0.5", eval_every=1,
        out=tmp_path / "run", **settings,
    )  # fmt: skip
    first = result.evaluations[0].iteration
    assert result.iteration == ended_at + first
    reached = [event for event in result.events if event.name == "target_reached"]
    assert len(reached) == (reached_at is not None)
    if reached_at is not None:
        assert result.time_to_target_s == result.evaluations[reached_at].time_s


def test_a_lucky_touch_reaches_no_target_in_a_study(tmp_path: Path) -> None:
    made = Made([(n, float(n), 10 * n, value) for n, value in enumerate(TOUCHED)])
    for hold, time_s in ((None, 1.0), (1, 1.0), (2, 3.0), (4, 3.0), (5, None)):
        trial = study(tmp_path / str(hold), {("single", 1, 0): made}, hold=hold).frames.trials.iloc[0]
        assert trial["reached"] == (time_s is not None)
        assert time_s is None or (trial["time_to_target_s"], trial["resolution_s"]) == (time_s, 1.0)


def test_targets_on_the_way_have_their_times_in_the_summary(tmp_path: Path) -> None:
    made = Made([(n, float(n), 10 * n, value) for n, value in enumerate(TOUCHED)])
    frames = study(
        tmp_path / "s", {("single", 1, 0): made}, target="accuracy=0.55", passed_targets=("accuracy=0.5",), hold=2
    ).frames
    table = summary_table(frames, has_target=True, metric="accuracy", seconds="s")
    cells = dict(zip(table["headings"], [cell.text for cell in table["rows"][0]["cells"]], strict=True))
    assert cells["time to accuracy>=0.5 (s)"] == "3"
    assert cells["time to target (s)"] == "5"
