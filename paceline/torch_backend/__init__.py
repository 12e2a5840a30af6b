"""Paceline's collectives as a torch.distributed backend, which `import torch` registers under the name `paceline`.

    torch.distributed.init_process_group("paceline")

Everything after that is torch.distributed as ever: DistributedDataParallel, FSDP2, process groups, object collectives.

torch calls `autoload` through the entry point that the package declares, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set;
importing this package registers the name, too. The rest of it is loaded when the first group is made.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from paceline.comm.connecting import connect
    from paceline.torch_backend.process_group import PacelineProcessGroup

__all__ = ["BACKEND_NAME", "PacelineProcessGroup", "autoload", "connect", "register"]

BACKEND_NAME = "paceline"
_HOMES = {"PacelineProcessGroup": "paceline.torch_backend.process_group", "connect": "paceline.comm.connecting"}


def register() -> None:
    """Make torch know the name. Does nothing the second time, or where torch was built without torch.distributed."""
    if dist.is_available() and not hasattr(dist.Backend, BACKEND_NAME.upper()):
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu"])


def autoload() -> None:
    """What `import torch` calls, which an error here would break: it becomes a warning."""
    try:
        register()
    except Exception as error:
        warnings.warn(f"torch.distributed has no backend {BACKEND_NAME!r}: {error}", stacklevel=2)


def _create(options: Any, backend_options: Any) -> "PacelineProcessGroup":
    from paceline.torch_backend.process_group import create

    return create(options, backend_options)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


autoload()
