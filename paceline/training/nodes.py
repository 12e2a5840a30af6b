"""Reads the nodes of autograd graphs: shapes, what they have saved, and where they come from."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

SHAPED = (
    *("ViewBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
)
PASSED_THROUGH = (
    *("AddBackward0", "SubBackward0", "RsubBackward1", "NegBackward0", "ToCopyBackward0", "CloneBackward0"),
    *SHAPED,
)
MEAN, SUM = 1, 2
"""Values of `reduction`, as torch's losses keep it for their backward pass."""
MOST_NODES = 1000
"""How many nodes of a graph are looked at."""
_LAYERS = ("mm", "mv", "linear", "conv", "embedding", "rnn", "gru", "lstm", "batchnorm", "layernorm", "compiled")
"""What names of nodes hold where parameters may meet data."""


def shape_after(node: Any, output: int = 0) -> tuple[int, ...]:
    """The shape of what the node's operation computed; none of nested tensors. What it has saved may be gone by now."""
    found = getattr(node, "_input_metadata", ())
    return () if not found or getattr(found[output], "is_nested_tensor", False) else tuple(found[output].shape)


TELLS_PACKED = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Which torch has not always done."""


def number_in(node: Any, name: str) -> float:
    """The number that a node has saved; NaN if it has not."""
    saved = saved_by(node, name)
    if isinstance(saved, int | float):
        return float(saved)
    return float(saved) if saved is not None and saved.numel() == 1 and not saved.is_complex() else math.nan


def saved_by(node: Any, name: str) -> Any:
    """None as well if looking would unpack it, as checkpoints allow once alone, or if an earlier pass has freed it, as
    it may what `backward(inputs=...)` leaves out."""
    try:
        return None if is_packed(node, name) else getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None


def is_packed(node: Any, name: str) -> bool:
    return getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None


def is_any_packed(node: Any) -> bool:
    """Whether the node cannot be asked without unpacking what it has saved, as far as this release of torch tells."""
    saved = [name.removeprefix("_raw_saved_") for name in dir(node) if name.startswith("_raw_saved_")]
    return bool(saved) and (not TELLS_PACKED or any(is_packed(node, name) for name in saved))


def is_mean_over_rows(node: Any) -> bool:
    """Not over all that each row has, of which there are as many as samples still."""
    if node.name() != "MeanBackward1":
        return False
    dims, rank = node._saved_dim, len(node._saved_self_sym_sizes)
    return not dims or 0 in dims or 2**64 - rank in dims  # as nodes keep -rank


def stacked_in(node: Any) -> list[Any]:
    """Losses of one number each that the script has put into one tensor, to add them up or to take their mean."""
    if node is None or node.name() not in ("StackBackward0", "CatBackward0"):
        return []
    losses = [inner for inner, _ in node.next_functions]
    is_one_each = all(math.prod(shape_after(*place)) == 1 for place in node.next_functions)
    return losses if is_one_each and None not in losses else []


def is_of_data(node: Any) -> bool:
    """Whether it comes from a layer of the model, and not from parameters alone, as a penalty on weights does; that has
    few nodes."""
    graph = enumerate(graph_of(node), 1)
    return any(count == MOST_NODES or _takes_data(each) for count, each in graph)


def _takes_data(node: Any) -> bool:
    """Whether parameters meet what leads to none there."""
    name, inputs = node.name().lower(), [inner for inner, _ in node.next_functions]
    if name.startswith("mul"):  # by hand; what has the shape of a parameter belongs to a penalty on it
        shapes = [shape_after(*place) for place in node.next_functions if place[0] is not None]
        return None in inputs and shapes != [shape_after(node)]
    data = inputs[:1] if name.startswith("mv") else inputs  # the norm of a weight is estimated by vectors
    return "embedding" in name or (any(part in name for part in _LAYERS) and not all(map(_has_parameter, data)))


def _has_parameter(node: Any) -> bool:
    return any(isinstance(getattr(each, "variable", None), nn.Parameter) for each in graph_of(node))


def graph_of(node: Any) -> Iterator[Any]:
    """What a tensor was computed by, from its end on."""
    left, seen = [node], set[Any]()
    while left and len(seen) < MOST_NODES:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [inner for inner, _ in node.next_functions]
