"""Labels for profilers: made only while one looks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

import paceline
from paceline.engines.virtual.isolation.labels import only_where_seen


def names(profiler: profile) -> set[str]:
    return {event.key for event in profiler.key_averages()}


def step() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    SGD([weight], lr=0.1).step()


@record_function("decorated")
def decorated() -> None:
    """Enters the same label each time."""


def test_a_profiler_sees_torchs_labels_and_the_scripts_own() -> None:
    with only_where_seen(), profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
        with record_function("outer"), record_function("inner"):
            pass
    assert {"Optimizer.step#SGD.step", "outer", "inner"} <= names(seen)


def test_without_a_profiler_no_label_is_made() -> None:
    with only_where_seen(), record_function("mine") as label:
        assert label.record is None


def test_a_label_is_entered_with_and_without_a_profiler() -> None:
    with only_where_seen():
        for _ in range(2):
            decorated()
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                decorated()
            assert "decorated" in names(seen)


def test_profilers_may_begin_and_end_within_a_label() -> None:
    with only_where_seen():
        profiler = profile(activities=[ProfilerActivity.CPU])
        with record_function("before"):
            profiler.start()
        with record_function("after"):
            profiler.stop()
    assert "before" not in names(profiler)
    assert "after" in names(profiler)


def test_what_fails_within_a_label_is_what_is_raised() -> None:
    with only_where_seen(), pytest.raises(KeyError), record_function("mine"):
        raise KeyError


def test_labels_are_as_before_afterwards() -> None:
    before = record_function.__enter__
    with only_where_seen():
        assert record_function.__enter__ is not before
        left_later = record_function("left later")
        left_later.__enter__()
    left_later.__exit__(None, None, None)
    assert record_function.__enter__ is before
    with record_function("mine") as label:
        assert label.record is not None


def test_simulated_scripts_make_none(tmp_path: Path) -> None:
    made = []

    def script() -> None:
        paceline.init()
        with record_function("mine") as label:
            made.append(label.record)

    paceline.run(script, strategy="single", engine="virtual", cluster="lab-1gbe", out=tmp_path / "run")
    assert made == [None]
