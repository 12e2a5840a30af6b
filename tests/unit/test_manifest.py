"""What a run's manifest says of its strategy."""

from __future__ import annotations

import pytest

from paceline.config import RunConfig
from paceline.running.manifest import describe_run
from paceline.strategies import build


@pytest.mark.parametrize(("name", "unit"), [("all-reduce", "update"), ("ps-bsp", "update"), ("ps-ssp", "gradient")])
def test_the_unit_of_an_iteration_stands_beside_the_strategy(name: str, unit: str) -> None:
    described = describe_run(
        program="train.py", arguments=(), strategy=build(name), num_workers=2, config=RunConfig(seed=3)
    )
    assert (described["strategy"]["name"], described["unit"]) == (name, unit)
