"""torch.distributed among the workers of a run, for frameworks that ask it who is there."""

import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import FileStore, PrefixStore, Store

from paceline.engines.world import World, current
from paceline.training.worker import Worker


def join_group(worker: Worker) -> None:
    """Make torch's default process group of the run's workers, over Paceline's backend, and describe it in the
    environment. Collective call; a second one finds all there."""
    world = current()
    assert world is not None
    described = {
        "ACCELERATE_TORCH_DEVICE": str(worker.device),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads())),  # else it is set anew
    }
    if worker.size > 1:  # one by itself would look for others
        described |= {
            "RANK": str(worker.rank),
            "WORLD_SIZE": str(worker.size),
            "LOCAL_RANK": str(worker.local_rank),
            "LOCAL_WORLD_SIZE": str(world.context.local_size),
        }
    if described.items() <= os.environ.items() and (worker.size == 1 or distributed.is_initialized()):
        return
    if world.store is not None and "MASTER_ADDR" not in os.environ:  # by its network the group goes, too
        described["MASTER_ADDR"] = worker.broadcast_object(world.address)
    world.at_release.append(partial(_put_back, {name: os.environ.get(name) for name in described}))
    os.environ |= described
    if worker.size == 1 or distributed.is_initialized():
        return
    backend = "paceline" if worker.device.type == "cpu" else "cpu:paceline,cuda:nccl"
    store = PrefixStore("frameworks", world.store) if world.store is not None else _file_store(worker, world)
    distributed.init_process_group(backend, store=store, rank=worker.rank, world_size=worker.size)
    world.at_release.insert(0, distributed.destroy_process_group)


def _file_store(worker: Worker, world: World) -> Store:
    """Where all are on one host. Its file goes with the first worker's world.

    It has no directory of its own: torch's store, which opens its file once more as it goes, would wait for one that is
    gone until its timeout, and then end the process.
    """
    own = ""
    if worker.rank == 0:
        file, own = tempfile.mkstemp(prefix="paceline-group-")
        os.close(file)
        world.at_release.append(partial(Path(own).unlink, missing_ok=True))  # the last one to go may have removed it
    return FileStore(worker.broadcast_object(own), worker.size)


def _put_back(before: Mapping[str, str | None]) -> None:
    """Whatever starts in this process later is not of this run."""
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
