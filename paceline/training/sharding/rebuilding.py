"""The script's DataLoader over another data set or sampler."""

from typing import Any

import torch
from torch.utils.data import DataLoader


def rebuilt(loader: DataLoader[Any], dataset: Any, generator: torch.Generator, **changes: Any) -> DataLoader[Any]:
    """A loader of this data set with the script's own loader workers, collation and pinning.

    Args:
        generator: seeds the loader workers.
    """
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
        workers["multiprocessing_context"] = loader.multiprocessing_context
    kept: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        **workers,
    }
    return DataLoader(dataset, generator=generator, **{**kept, **changes})
