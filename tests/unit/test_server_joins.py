"""What the benchmark of servers that join makes of what it sees."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("server_joins")
    for name in {path.stem for path in BENCHMARKS.glob("*.py")}:
        sys.modules.pop(name, None)


def pause_s(joins: Any, ends_s: list[float]) -> float:
    """Of a run whose server is asked for after 10 s, has joined after 12 and been handed a key range after 15."""
    told = [
        joins.Told(10.0, "asked", {}),
        joins.Told(12.0, "server_joined", {}),
        joins.Told(13.0, "copying", {}),
        joins.Told(14.0, "copied", {"took_s": 1.0}),
        joins.Told(15.0, "taken_over", {}),
    ]
    found: float = joins.found_of(ends_s, told).pause_s
    return found


def test_a_pause_around_a_handover_counts_however_long_it_is(joins: Any) -> None:
    before = [0.1 * number for number in range(140)]
    for first_s, after_s in ((14.8, 15.2), (14.8, 18.0), (14.0, 20.0)):
        steps = [*before, first_s, after_s, after_s + 0.1]
        assert pause_s(joins, steps) == pytest.approx(max(after_s - first_s, first_s - 13.9) - 0.1)
    short = [*before, *(14.0 + 0.1 * number for number in range(30)), 30.0]
    assert pause_s(joins, short) == pytest.approx(0.0), "a long step that begins later is none of it"
    assert math.isnan(pause_s(joins, before))


@pytest.fixture
def asked(joins: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the run is asked for, which has made steps enough to be asked."""
    noted: list[dict[str, Any]] = []
    monkeypatch.setattr(joins.requests, "ask", lambda out, request: noted.append(request))
    monkeypatch.setattr(joins, "ALONE_S", 0.0)
    return noted


@pytest.mark.parametrize("event", ["not_joined", "failed"])
def test_a_run_that_no_server_joins_is_told_to_stop(
    joins: Any, asked: list[dict[str, Any]], tmp_path: Path, event: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "steps-0").write_text("step\n" * joins.WARM_STEPS)
    (tmp_path / "out" / "events.jsonl").write_text(json.dumps({"name": event, "details": {}}) + "\n")
    with pytest.raises(RuntimeError, match="no server has joined"):
        joins.have_one_join(tmp_path, 3, Event())
    assert asked == [{"do": "scale", "servers": 3}, {"do": "stop"}]


def test_nobody_waits_for_a_run_that_is_over(joins: Any, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    is_over = Event()
    is_over.set()
    with pytest.raises(RuntimeError, match="the run was over before a server had joined"):
        joins.have_one_join(tmp_path, 3, is_over)
    assert not asked
