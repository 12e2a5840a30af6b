"""What a script's text says of its evaluation, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.errors import UsageError
from paceline.training.evaluation import metrics_in

SCRIPT = """
worker = paceline.init()

@worker.evaluation
def score(model):
    if quick:
        return {"accuracy": 1.0}
    return {"accuracy": test(model), "loss": 2.0}
"""


def test_literal_names_are_known() -> None:
    assert metrics_in(SCRIPT) == {"accuracy", "loss"}


@pytest.mark.parametrize("returned", ["test(model)", "{name: 1.0}", '{**more, "accuracy": 1.0}', "dict(accuracy=1.0)"])
def test_other_texts_say_nothing(returned: str) -> None:
    assert metrics_in(SCRIPT.replace('{"accuracy": 1.0}', returned)) is None
    assert metrics_in("import paceline\n") is None


def test_unknown_metric_is_refused_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with pytest.raises(UsageError, match="unknown target metric 'acuracy'; did you mean 'accuracy'"):
        paceline.run(script, target="acuracy=0.9", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
