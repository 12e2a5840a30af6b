"""Elastic jobs: `@hvd.elastic.run`, and what they keep."""

from collections.abc import Callable
from typing import TypeVar

from paceline.horovod.common.elastic import run_fn
from paceline.horovod.torch.elastic.sampler import ElasticSampler
from paceline.horovod.torch.elastic.state import TorchState

_Result = TypeVar("_Result")


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Call the function anew, with the state of its last commit, when workers have come or gone.

    Args:
        func: its first argument is the state, of which all else that it needs to go on is part.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    from paceline.horovod.torch import init, shutdown

    shutdown()
    init()


__all__ = ["ElasticSampler", "TorchState", "run"]
