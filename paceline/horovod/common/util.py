"""What is built, as `horovod.common.util` tells it, and its `env`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from paceline.horovod.torch import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)

__all__ = ["ccl_built", "cuda_built", "ddl_built", "env", "gloo_built", "mpi_built", "nccl_built", "rocm_built"]


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set variables of the environment inside; None leaves one as it is."""
    with mock.patch.dict(os.environ, {name: value for name, value in kwargs.items() if value is not None}):
        yield
