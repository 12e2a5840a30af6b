"""Notices that all ranks compute the same gradients, though the batches that they were given differ."""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.hooks import OwnHook, place_in_script
from paceline.strategies.digests import digest
from paceline.training.divisors import Divisors
from paceline.training.outside import Outside
from paceline.training.same_weights import SameWeights
from paceline.training.sharding import DIFFERS
from paceline.training.sharding.contents import tensors_in

_NUM_STEPS = 2
"""Steps that are looked at: one of them may be of a penalty on weights alone, which is the same on all ranks."""
_NUM_ROWS, _NUM_ELEMENTS = 16, 1024
_NUM_LOOKS = 2
"""After so many equal looks in a row it is no chance. Data that are all alike give the same batches, too."""


@final
class SameGradients:
    """Looks at each rank's own gradients, before they are averaged, in the steps after a pause, and tells them in the
    next one. Such a script trains on tensors that it slices or draws itself, alike on every rank.

    Args:
        prepared: all parameters of the prepared models, frozen ones too.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        prepared: Sequence[Tensor],
        size: int,
        is_first: bool,
        is_off: Callable[[], bool],
        num_samples: Callable[[], int],
    ) -> None:
        self.weights = SameWeights(parameters, is_off=is_off, some_of=_some_of)
        self.divisors = Divisors(is_first=is_first, num_samples=num_samples)
        self.outside = Outside(prepared, is_first=is_first, some_of=_some_of)
        """These look at the same backward passes."""
        self.on_begin: Callable[[], object] = lambda: None
        """Called where a look begins."""
        self._parameters, self._size, self._is_first = parameters, size, is_first
        self._hooks: list[RemovableHandle] = []
        self.is_looking = False
        self._gradients: dict[str, None] = {}
        self._batch = ""  # the one that was handed out last while somebody looked
        self._num_steps = self._num_looks = 0
        self._before: set[str] = set()  # what all told in the look before
        self.begin()

    def begin(self) -> None:
        """Look at the next steps."""
        self._gradients, self._num_steps = {}, 0
        self.weights.begin()
        self.divisors.begin()
        self.outside.begin()
        self.on_begin()
        if not self._hooks:
            self._hooks = [
                parameter.register_hook(OwnHook(partial(self._take, number)))
                for number, parameter in enumerate(self._parameters)
                if parameter.requires_grad
            ]
            self.is_looking = bool(self._hooks)

    def hand_out(self, data: Any) -> None:
        """The script gets this batch while somebody looks."""
        tensors = tensors_in(data)
        self.outside.hand_out(tensors)
        self._batch = digest(map(_some_of, tensors))

    def end_step(self) -> None:
        """A step is over while somebody looks."""
        self._num_steps += 1
        self.outside.end_step()
        if self._num_steps == _NUM_STEPS:
            self.close()

    def said(self) -> list[str]:
        """What this rank tells the others in a pause: its gradients since the one before, and a batch."""
        gradients = hashlib.blake2b("".join(self._gradients).encode(), digest_size=8).hexdigest()
        return [gradients if self._gradients else "", self._batch]

    def compare(self, everyone: Sequence[Sequence[str]]) -> None:
        """Warn, on rank 0, if they were the same on all ranks in several looks in a row, and batches were not. What is
        the same from look to look as well comes from no data.

        It is no error: a loss that no data are in has the same gradients everywhere, too.
        """
        gradients, batches = map(set, zip(*everyone, strict=True))
        if gradients == {""}:
            return
        is_alike = len(gradients) == 1 and (len(batches) > 1 or batches == {""})
        self._num_looks = self._num_looks + 1 if is_alike and gradients != self._before else 0
        self._before = gradients
        if self._num_looks == _NUM_LOOKS and self._is_first:
            place_in_script().warn(
                f"all {self._size} ranks compute the same gradients, step after step, though the prepared loader gives "
                "each other batches: if the script trains on data that are the same on every rank, such as tensors "
                "that it slices or draws itself, all workers do what one would. Loop over what prepare returned, or "
                "take this rank's part of the data (data[worker.rank :: worker.size]); if it is to be so, set "
                f"loader.dataset.{DIFFERS} = True"
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.is_looking = [], False
        self.divisors.close()
        self.outside.close()

    def _take(self, number: int, gradient: Tensor) -> None:
        """Nothing is told by gradients that are zero or not finite; sparse ones are refused where they arrive."""
        self.weights.take(number)
        self.divisors.take()
        self.outside.take()
        if gradient.layout is not torch.strided:
            return
        some = _some_of(gradient)
        if bool(some.any()) and bool(some.isfinite().all()):
            self._gradients[digest([some])] = None


def _some_of(tensor: Tensor) -> Tensor:
    """As many elements as no step feels."""
    return tensor.detach()[:_NUM_ROWS].flatten()[:_NUM_ELEMENTS] if tensor.dim() else tensor.detach()
