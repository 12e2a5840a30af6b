"""A stand-in for Ray and the runs on it, so that studies can be run without either."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.engines.scripting import Script
from paceline.strategies import name_of
from tests.lab.made import reaching, write_trial

SETTINGS: dict[str, Any] = {"strategies": ["all-reduce", "ps-bsp"], "workers": [1, 2], "target": "accuracy=0.5"}
ORDER = [
    f"{strategy}-n{workers}-s{seed}" for seed in (0, 1) for strategy in ("all-reduce", "ps-bsp") for workers in (1, 2)
]


class Machine:
    """Stands for Ray and the runs on it: each run writes a few records; one may be told to fail."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.sources: list[str] = []
        self.environments: list[dict[str, str]] = []
        self.num_connections = 0
        self.addresses: list[str | None] = []
        self.fault: Callable[[str], None] = lambda name: None

    @contextlib.contextmanager
    def connected(self, address: str | None, *, insecure: bool) -> Iterator[None]:
        self.num_connections += 1
        self.addresses.append(address)
        yield

    def run(self, script: Script, *, strategy: Any, workers: int, seed: int, out: Path, **settings: Any) -> None:
        name = f"{name_of(strategy)}-n{workers}-s{seed}"
        self.started.append(name)
        self.sources.append(script.source)
        self.environments.append(settings["environment"])
        assert not out.exists()
        write_trial(out, reaching(10.0 / workers + seed), workers=workers)
        (out / "trial.json").unlink()
        (out / "checkpoint.pt").touch()
        self.fault(name)
