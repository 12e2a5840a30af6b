"""Paceline: one PyTorch script, any data-parallel architecture, and the clock that tells which gets there first."""

from paceline.errors import PacelineError, RunFailed, UsageError
from paceline.launch import run
from paceline.result import Result
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.parameter_server import ParameterServer
from paceline.strategies.single import Single
from paceline.worker import Worker, init

__all__ = [
    "AllReduce",
    "PacelineError",
    "ParameterServer",
    "Result",
    "RunFailed",
    "Single",
    "UsageError",
    "Worker",
    "init",
    "run",
]
