"""Random state of a worker: torch, numpy and the standard library together."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive(seed: int, *path: int | str) -> int:
    """An independent 63-bit seed for each path, such as `derive(seed, "epoch", 3)`; the same on any machine."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    # Where there is no accelerator, `torch.manual_seed` takes 0.5 ms all the same: it keeps who asked to seed one.
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_state() -> dict[str, Any]:
    """Plain data that `set_random_state` takes back. Many numbers are tensors: a list of 625 takes 5 ms to unpickle."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(torch.as_tensor(numbers).tolist()), gauss))  # Older checkpoints have a list.
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """What happens inside leaves the random state as it was."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
