"""Numbers in the documentation are those that were measured last, and what predictions promise is judged honestly."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = """# Page

<!-- result: made -->

```bash
{command}
```

<!-- end -->

Words.
"""
TOLD = {"tables": [{"title": "", "columns": ["what", "s"], "is_number": [False, True], "rows": [["all", "0.5"]]}]}


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of the benchmarks, which import each other by their own names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module
    for name in {path.stem for path in BENCHMARKS.glob("*.py")}:
        sys.modules.pop(name, None)


def test_pages_show_what_was_measured_last() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "results.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def results(imported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With one page of its own, whose first command prepares and whose second tells a table."""
    found: ModuleType = imported("results")
    (tmp_path / "tell.py").write_text(f"print('words')\nprint({json.dumps(json.dumps(TOLD))})\n", encoding="utf-8")
    (tmp_path / "prepare.py").write_text("print('ready')\n", encoding="utf-8")
    command = f"python {tmp_path / 'prepare.py'}\npython \\\n    {tmp_path / 'tell.py'}"
    (tmp_path / "page.md").write_text(PAGE.format(command=command), encoding="utf-8")
    monkeypatch.setattr(found, "PAGES", [tmp_path / "page.md"])
    monkeypatch.setattr(found, "KEPT", tmp_path / "results")
    return found


def test_a_result_is_measured_kept_and_shown(results: ModuleType, tmp_path: Path) -> None:
    (place,) = results.places().values()
    assert results.mistake(place) == "page.md: made has not been measured"
    with pytest.raises(SystemExit) as ended:
        results.measure_all([place])
    assert ended.value.code is None
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert f"| all | 0.5 |\n\n*Measured on commit {results.commit()}.*\n\n<!-- end -->\n\nWords." in page
    assert results.mistake(place) == ""
    (tmp_path / "page.md").write_text(page.replace("0.5", "0.4"), encoding="utf-8")
    assert results.mistake(place) == "page.md does not show what was measured"
    (tmp_path / "page.md").write_text(page.replace("tell.py", "tell.py --twice"), encoding="utf-8")
    (other,) = results.places().values()
    assert results.mistake(other) == "page.md: the command of made is not the one that was measured"


def test_a_command_that_fails_or_tells_nothing_leaves_its_page(results: ModuleType, tmp_path: Path) -> None:
    before = (tmp_path / "page.md").read_text(encoding="utf-8")
    (place,) = results.places().values()
    for text, said in (("raise SystemExit(3)", "made ended with 3"), ("print('{}')", "made: no command told a table")):
        (tmp_path / "tell.py").write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit, match=said):
            results.measure_all([place])
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == before
    assert not (tmp_path / "results").exists()


def test_predictions_are_judged_on_cells_that_nothing_was_fitted_to(imported: Any) -> None:
    prediction = imported("prediction_cells")
    cells = prediction.held_out()
    assert {cell.workload for cell in cells} == {"sleep", "compute"}
    assert {cell.num_hosts for cell in cells}.isdisjoint(prediction.FITTED_HOSTS)
    assert {cell.rate_mbit for cell in cells}.isdisjoint(prediction.FITTED_MBIT)
    assert all(cell.num_servers <= cell.num_hosts for cell in cells)
    # Errors from 0 to 5 %, and then one of 11 %, and all of them four times as large.
    rows = [
        prediction.Row(cell, 1.0, 1.0, 1.0, predicted_s=1.0 + (-1) ** number * 0.05 * number / len(cells))
        for number, cell in enumerate(cells)
    ]
    assert prediction.missed(rows, cells) == []
    one_off = [replace(rows[0], predicted_s=0.89), *rows[1:]]
    assert prediction.missed(one_off, cells) == ["the worst error is 11.0%, more than 10%"]
    off = [replace(row, predicted_s=1 + 4 * row.error) for row in rows]
    assert [line.split(" is ")[0] for line in prediction.missed(off, cells)] == ["the median error", "the worst error"]
    unknown = [replace(rows[0], predicted_s=math.nan), *rows[2:]]
    assert prediction.missed(unknown, cells) == [f"2 of {len(cells)} cells have no number"]


def test_checks_that_the_hot_path_counts_are_those_of_the_package(imported: Any) -> None:
    checks = imported("hot_path_checks")
    with checks.Spent().counted(), checks.unchecked():
        pass
