"""Paceline: one PyTorch script, any data-parallel architecture, and the clock that tells which gets there first."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.errors import PacelineError, RunFailed, UsageError
    from paceline.lab.study import Study
    from paceline.running.launch import run
    from paceline.running.result import Result
    from paceline.strategies.all_reduce import AllReduce
    from paceline.strategies.parameter_server import ParameterServer
    from paceline.strategies.single import Single
    from paceline.training.worker import Worker, init

__all__ = [
    "AllReduce",
    "Elastic",
    "PacelineError",
    "ParameterServer",
    "Result",
    "RunFailed",
    "Single",
    "Study",
    "UsageError",
    "Worker",
    "init",
    "run",
]

# Imported when first used: `paceline doctor` must be able to say that torch or Ray is missing, and a script that runs
# by itself need not load Ray (0.3 s).
_HOMES = {
    "AllReduce": "paceline.strategies.all_reduce",
    "Elastic": "paceline.elastic.spec",
    "PacelineError": "paceline.errors",
    "ParameterServer": "paceline.strategies.parameter_server",
    "Result": "paceline.running.result",
    "RunFailed": "paceline.errors",
    "Single": "paceline.strategies.single",
    "Study": "paceline.lab.study",
    "UsageError": "paceline.errors",
    "Worker": "paceline.training.worker",
    "init": "paceline.training.worker",
    "run": "paceline.running.launch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
