"""Runs of scripts with several models, optimizers or loaders, in double precision: on which engines, and under what."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.strategies import STRATEGIES, build
from tests.conformance import local_engine, virtual_engine

ENGINES = {"local": local_engine, "virtual": virtual_engine}
OWN_NAMES = [
    name for name, entry in STRATEGIES.items() if not entry.is_another_name and not build(name).traits.by_script
]
HAVE_CLIENTS = [name for name in OWN_NAMES if build(name).participation() is not None]


TWO_CLIENTS = {"clients": 2, "fraction": 1.0}
TAKE_ONE = ["async-diloco"]
"""Optimizer."""


@pytest.fixture(autouse=True)
def in_double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def launched(script: Any) -> None:
    script(paceline.init())


def run(engine: str, script: Any, out: Path, strategy: str, workers: int = 2, **settings: Any) -> Any:
    return ENGINES[engine].run(partial(launched, script), strategy=strategy, workers=workers, out=out, **settings)
