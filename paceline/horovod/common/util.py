"""What is built, as `horovod.common.util` tells it, and its `env`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.horovod import torch as _torch


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is Horovod's interface for `torch`, `tensorflow` or `mxnet`."""
    return ext_base_name == "torch"


def _told(built: Callable[[], int]) -> Callable[..., bool]:
    def is_built(verbose: bool = False) -> bool:
        return bool(built())

    return is_built


ccl_built = _told(_torch.ccl_built)
cuda_built = _told(_torch.cuda_built)
ddl_built = _told(_torch.ddl_built)
gloo_built = _told(_torch.gloo_built)
mpi_built = _told(_torch.mpi_built)
nccl_built = _told(_torch.nccl_built)
rocm_built = _told(_torch.rocm_built)


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set variables of the environment inside; None leaves one as it is."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
