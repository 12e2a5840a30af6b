"""What a script exchanges by itself carries numbers: no gradient comes back from other workers."""

import warnings
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from paceline.training.sharding.contents import tensors_in
from paceline.training.trees import with_leaves


@final
class Detaching:
    """Has the script's tensors exchanged without their gradients, and says so once, in words that name the rank and
    what to do."""

    def __init__(self, *, rank: int) -> None:
        self._rank, self._has_told = rank, False

    def given(self, what: str, tree: Any) -> Any:
        """The tree to exchange by the call `what`: no tensor in it requires a gradient."""
        if not any(tensor.requires_grad for tensor in tensors_in(tree)):
            return tree
        if torch.is_grad_enabled():
            self._tell(what)
        return with_leaves(tree, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)

    def written(self, what: str, tensor: Tensor) -> Tensor:
        """The tensor, which the call `what` has written. What a graph has made has a history that is not of these
        values: without it, and a backward pass that needs the old ones raises."""
        if tensor.grad_fn is None:
            return tensor
        if torch.is_grad_enabled():
            self._tell(what)
        increment_version(tensor)
        return tensor.detach()

    def _tell(self, what: str) -> None:
        if self._has_told:
            return
        self._has_told = True
        warnings.warn(
            f"rank {self._rank}: {what} of a tensor that requires a gradient gives tensors that require none, since "
            "none comes back from other workers: a loss of them would lack a part. Give it tensor.detach(), if that is "
            "meant; where this worker's own part is to have a gradient, put it back: "
            "parts = worker.all_gather(tensor.detach()), then parts[worker.rank] = tensor",
            stacklevel=4,
        )
