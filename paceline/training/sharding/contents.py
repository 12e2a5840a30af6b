"""What a batch or a sample holds, whatever it is made of."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TENSORS = {Tensor}


def leaves_in(thing: Any) -> Iterator[Any]:
    """What nested lists, tuples and mappings hold, in order."""
    if isinstance(thing, Mapping):
        thing = [part for item in thing.items() for part in item]
    if isinstance(thing, list | tuple):
        for part in thing:
            yield from leaves_in(part)
    else:
        yield thing


def tensors_in(thing: Any, *, opens: bool = True) -> list[Tensor]:
    """The dense tensors in nested lists, tuples and mappings, and, if it `opens` them, in the attributes of things of
    other kinds among these. Lists of numbers, which may be long, hold none."""
    if isinstance(thing, Tensor):
        return [thing] if thing.layout is torch.strided and not thing.is_nested else []
    if isinstance(thing, list | tuple):
        if isinstance(thing, list) and thing and isinstance(thing[0], int | float | str):
            return []
        if set(map(type, thing)) == _TENSORS:  # as of most batches, without a call
            found = []
            for tensor in thing:
                if tensor.layout is torch.strided and not tensor.is_nested:
                    found.append(tensor)
            return found
        return [tensor for part in thing for tensor in tensors_in(part, opens=opens)]
    if isinstance(thing, Mapping):
        return tensors_in(tuple(thing.values()), opens=opens)
    if opens and hasattr(thing, "__dict__") and not callable(thing):
        return tensors_in(tuple(vars(thing).values()), opens=False)
    return []


def num_samples_in(item: Any) -> int:
    """How many samples an item of unbatched data holds: as many as all of its tensors are long, if it has several."""
    lengths = [len(tensor) if tensor.dim() else 0 for tensor in tensors_in(item)]
    return max(1, lengths[0]) if len(lengths) > 1 and len(set(lengths)) == 1 else 1


def digest_of(samples: Any) -> str:
    """The same wherever the samples are: tensors, arrays, text and numbers by value, other things by their type."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves_in(samples):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            digest.update(leaf.tobytes())
        elif isinstance(leaf, bytes | bytearray):
            digest.update(leaf)
        elif isinstance(leaf, str | int | float | bool | None | np.generic):
            digest.update(repr(leaf).encode())
        else:
            digest.update(type(leaf).__qualname__.encode())
    return digest.hexdigest()
