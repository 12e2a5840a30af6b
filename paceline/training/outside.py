"""Notices tensors that losses depend on, that are of no prepared model, and that each worker has otherwise, as where
the script trains them by hand: with its own gradients, batch after batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from paceline.hooks import Place, backward_calls, place_in_script
from paceline.strategies.digests import digest
from paceline.training.nodes import graph_of

OWN = "differs_by_rank"
"""What a script sets on a tensor that is each worker's own."""
_MOST_LOOKS = 4
"""Who trains a tensor by hand does so from the first steps on."""

Said = tuple[list[int], str]


class _Seen(NamedTuple):
    tensor: TensorWeakRef
    step: int
    place: Place


@final
class Outside:
    """Looks, while it listens, at what the graphs of backward passes end in. A tensor that it meets in several steps is
    no batch's; one with a place for each sample of a batch is its samples'.

    Args:
        parameters: of the prepared models.
        some_of: as many elements as no step feels.
    """

    def __init__(self, parameters: Sequence[Tensor], *, is_first: bool, some_of: Callable[[Tensor], Tensor]) -> None:
        self._prepared = {id(parameter) for parameter in parameters}
        self._is_first, self._some_of = is_first, some_of
        self._seen: dict[int, _Seen] = {}
        self._kept: dict[int, _Seen] = {}  # that were there in a later step, too
        self._samples: set[torch.Size] = set()
        self._num_looks = self._step = 0
        self._is_the_models = self._has_told = False

    def begin(self) -> None:
        """Look at the next steps."""
        self._num_looks += 1
        if self._num_looks <= _MOST_LOOKS:
            backward_calls.add(self)

    def hand_out(self, tensors: Sequence[Tensor]) -> None:
        """The script gets a batch of these."""
        self._samples.update(tensor.shape[1:] for tensor in tensors)

    def take(self) -> None:
        """The pass under way brings a gradient of the model."""
        self._is_the_models = True

    def end_step(self) -> None:
        self._step += 1

    def close(self) -> None:
        backward_calls.remove(self)

    def look(self, backward: Callable[..., Any], tensors: Any, *more: Any, **named: Any) -> Any:
        """The script calls `backward`."""
        if isinstance(tensors, Iterator):
            tensors = tuple(tensors)
        begun = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._is_the_models = False
        result = backward(tensors, *more, **named)
        if self._is_the_models:
            for each in begun:
                self._meet(getattr(each, "grad_fn", None))
        return result

    def _meet(self, root: Any) -> None:
        for node in graph_of(root):
            leaf = getattr(node, "variable", None)
            if leaf is None or id(leaf) in self._prepared or getattr(leaf, OWN, False):
                continue
            before = self._seen.get(id(leaf))
            if before is None or before.tensor() is not leaf:
                self._seen[id(leaf)] = _Seen(TensorWeakRef(leaf), self._step, place_in_script())
            elif before.step < self._step and not self._is_of_samples(leaf):
                self._kept[id(leaf)] = before

    def _is_of_samples(self, leaf: Tensor) -> bool:
        return leaf.shape[:1] != (1,) and leaf.dim() > 0 and leaf.shape[1:] in self._samples

    def said(self) -> list[Said]:
        """What this rank tells the others in a pause."""
        alive = [tensor for seen in self._kept.values() if (tensor := seen.tensor()) is not None]
        return [(list(tensor.shape), digest([self._some_of(tensor)])) for tensor in alive]

    def compare(self, everyone: Sequence[Sequence[Said]]) -> None:
        """Warn, once, on rank 0, if one is not the same on all ranks. It is no error: each worker may be to have its
        own."""
        shapes = {repr([shape for shape, _ in said]) for said in everyone}
        if self._has_told or not self._is_first or len(shapes) > 1:
            return
        for of_all, seen in zip(zip(*everyone, strict=True), self._kept.values(), strict=False):
            rank = next((rank for rank, said in enumerate(of_all) if said[1] != of_all[0][1]), None)
            if rank is not None:
                self._has_told = True
                seen.place.warn(
                    f"a tensor of shape {of_all[0][0]} that the loss depends on, and that is of no prepared model, is "
                    f"not the same on ranks 0 and {rank}: the script changes it by each worker's own gradient, or has "
                    "drawn it on each rank. Make it a parameter of a prepared model, which a prepared optimizer "
                    "trains; or change it by worker.all_reduce(gradient, op='mean'), from the same values. If each "
                    f"worker is to have its own, set tensor.{OWN} = True"
                )
                return
