"""Paceline's collectives as a torch.distributed backend: importing this package registers the name `paceline`.

    import paceline.torch_backend
    torch.distributed.init_process_group("paceline")

Everything after that is torch.distributed as ever: DistributedDataParallel, FSDP2, process groups, object collectives.
"""

import torch.distributed as dist

from paceline.comm.connecting import connect
from paceline.torch_backend.process_group import BACKEND_NAME, PacelineProcessGroup, create

__all__ = ["BACKEND_NAME", "PacelineProcessGroup", "connect"]

dist.Backend.register_backend(BACKEND_NAME, create, extended_api=True, devices=["cpu"])
