"""What the benchmark of clients beside Flower makes of the times at which turns begin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("flower")
    for name in {path.stem for path in BENCHMARKS.glob("*.py")}:
        sys.modules.pop(name, None)


def test_the_end_of_a_round_is_what_its_last_turn_takes_longer(flower: Any) -> None:
    begun_s = [0.0, 1.0, 2.0, 5.0, 6.0, 7.0, 10.0]
    assert flower.round_end_s(begun_s, 3) == pytest.approx(2.0)


def test_a_round_of_one_turn_has_no_turn_to_compare_its_end_with(flower: Any) -> None:
    assert flower.round_end_s([0.0, 1.0, 2.0], 1) is None
