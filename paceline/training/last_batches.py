"""Batches of a round, kept so that another model may see them when the round is over."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

PLAIN = (str, int, float, bool, type(None))
"""What may be in a batch beside tensors. Of anything else nobody knows whether the model has changed it."""


@final
class LastBatches:
    """The last batches that a model was given in the round that is under way, or is just over.

    Args:
        rounds: how many are over. No batch of an earlier one is kept, so that a run that goes on from a checkpoint
            finds what one that was never interrupted does.
        limit: of batches.
        device_types: on which the model computes.
    """

    def __init__(self, *, rounds: Callable[[], int], limit: int, device_types: Iterable[str]) -> None:
        self._rounds, self._device_types = rounds, sorted(device_types)
        self._batches: deque[LastBatch] = deque(maxlen=limit)
        self._round = -1

    def keep(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        """What a forward pass of the model is about to be given, unless it is more than tensors and plain values."""
        if self._round != (now := self._rounds()):
            self._batches.clear()
            self._round = now
        batch = LastBatch(inputs, named, self._device_types)
        if batch.is_plain:
            self._batches.append(batch)

    def clear(self) -> None:
        self._batches.clear()

    @property
    def unchanged(self) -> list["LastBatch"]:
        return [batch for batch in self._batches if batch.is_unchanged]


@final
class LastBatch:
    """What a model's forward pass was given, and under which autocast."""

    def __init__(self, inputs: Sequence[Any], named: Mapping[str, Any], device_types: Sequence[str]) -> None:
        leaves, self._structure = tree_flatten((tuple(inputs), dict(named)))
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._versions = self._versions_now()
        kinds = [kind for kind in device_types if torch.amp.is_autocast_available(kind)]
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @property
    def is_plain(self) -> bool:
        return all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in self._leaves)

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has changed a tensor in place since, such as a model that normalises its own input."""
        return self._versions_now() == self._versions

    def give(self, forward: Callable[..., object]) -> None:
        """Call it as the model was called. Its containers are new ones: a model may take out what it has used."""
        inputs, named = tree_unflatten(self._leaves, self._structure)
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            forward(*inputs, **named)

    def _versions_now(self) -> list[int]:
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        return [tensor._version for tensor in tensors if not tensor.is_inference()]
