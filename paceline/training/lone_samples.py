"""Says which batch it was where batch norm is left with one value a channel."""

from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.hooks import OwnHook
from paceline.training.sharding import Place


@final
class LoneSamples:
    """Watches a model's batch norm while a batch of one sample is out, such as the last of an epoch."""

    def __init__(self, model: nn.Module, *, rank: int) -> None:
        self._model, self._rank = model, rank
        self.places: dict[str, Place] = {}
        """Where the batches of one sample are that are out, by their loaders' names."""
        self._hooks: list[RemovableHandle] = []

    def expect(self, loader: str, place: Place, *, num_samples: int) -> None:
        """The script gets this batch, and is done with the loader's last one."""
        if num_samples == 1:
            if not self.places:
                self._watch()
            self.places[loader] = place
        elif self.places.pop(loader, None) and not self.places:
            self.close()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _watch(self) -> None:
        for name, module in self._model.named_modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                self._hooks.append(module.register_forward_pre_hook(OwnHook(partial(self._check, name))))

    def _check(self, name: str, module: nn.Module, inputs: Any) -> None:
        """
        Raises:
            UsageError: there is nothing to take a variance of.
        """
        values = inputs[0]
        if torch.compiler.is_compiling() or not module.training:
            return
        if isinstance(values, Tensor) and values.dim() > 1 and values.numel() == values.shape[1]:
            place = next(iter(self.places.values()))
            raise UsageError(
                f"rank {self._rank}: batch {place.num_batches_done + 1} of epoch {place.epoch} leaves "
                f"{name!r} one value a channel, of which batch norm has no variance; give the DataLoader "
                "drop_last=True or another batch size"
            )
