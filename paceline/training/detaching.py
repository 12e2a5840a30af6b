"""What a script exchanges by itself carries numbers: no gradient comes back from other workers."""

import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from paceline.training.trees import with_leaves


@final
class Detaching:
    """Has the script's tensors exchanged without their gradients, and says so once, in words that name the rank and
    what to do.

    Args:
        tell: records an event with its details.
    """

    def __init__(self, *, rank: int, tell: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._rank, self._tell_run, self._has_told = rank, tell, False

    def given(self, what: str, tree: Any) -> Any:
        """The tree to exchange by the call `what`: no tensor in it requires a gradient."""
        if not (tree.requires_grad if isinstance(tree, Tensor) else _Search().finds_gradient_in(tree)):
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
        self._tell_run("gradient_left_out", {"call": what})
        warnings.warn(
            f"rank {self._rank}: {what} of a tensor that requires a gradient gives tensors that require none, since "
            "none comes back from other workers: a loss of them would lack a part. Give it tensor.detach(), if that is "
            "meant; where this worker's own part is to have a gradient, put it back: "
            "parts = worker.all_gather(tensor.detach()), then parts[worker.rank] = tensor",
            stacklevel=4,
        )


@final
class _Search(pickle.Pickler):
    """Goes through plain data at the speed of C: pickling asks Python about other things alone."""

    def __init__(self) -> None:
        super().__init__(_Nowhere())
        self._has_found = False

    def finds_gradient_in(self, tree: Any) -> bool:
        self.dump(tree)
        return self._has_found

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            self._has_found |= thing.requires_grad
        if thing is int or thing is tuple:  # which stand for everything else
            return NotImplemented
        parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else None
        return (int, ()) if parts is None else (tuple, (tuple(parts),))


@final
class _Nowhere:
    def write(self, data: Any) -> None:
        """What is pickled is not wanted."""
