"""Says which batch it was where batch norm is left with one value a channel."""

from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import UsageError
from paceline.hooks import OwnHook
from paceline.training.sharding import Place


@final
class LoneSamples:
    """Watches a model's batch norm from the first batch of one sample on, such as the last of an epoch."""

    def __init__(self, model: nn.Module, *, rank: int) -> None:
        self._model, self._rank = model, rank
        self._place: Place | None = None

    def expect(self, place: Place) -> None:
        """The batch at this place holds one sample."""
        is_first, self._place = self._place is None, place
        for name, module in self._model.named_modules() if is_first else ():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                module.register_forward_pre_hook(OwnHook(partial(self._check, name)))

    def _check(self, name: str, module: nn.Module, inputs: Any) -> None:
        """
        Raises:
            UsageError: there is nothing to take a variance of.
        """
        values = inputs[0]
        if torch.compiler.is_compiling() or not module.training or self._place is None:
            return
        if isinstance(values, Tensor) and values.dim() > 1 and values.numel() == values.shape[1]:
            raise UsageError(
                f"rank {self._rank}: batch {self._place.num_batches_done + 1} of epoch {self._place.epoch} leaves "
                f"{name!r} one value a channel, of which batch norm has no variance; give the DataLoader "
                "drop_last=True or another batch size"
            )
