"""Tells by its graph whether a loss is something else than a linear function of what single samples lose."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.training.nodes import MEAN, MOST_NODES, SUM, is_of_data, shape_after
from paceline.training.sums import FACTORS, LEAF, NORMS, PRODUCTS, QUOTIENT, SUMS, Term

_BENT = (
    *("SqrtBackward0", "RsqrtBackward0", "LogBackward0", "Log1PBackward0", "ExpBackward0", "PowBackward0"),
    *("ReciprocalBackward0", "AbsBackward0", "LogsumexpBackward0", *NORMS),
)
_REDUCED = (*SUMS, *PRODUCTS, "MeanBackward0", "MeanBackward1", "LogsumexpBackward0", *NORMS)
_COMPARING = (
    *("TopkBackward0", "SortBackward0", "KthvalueBackward0", "MedianBackward0", "MedianBackward1"),
    *("MaxBackward0", "MaxBackward1", "MinBackward0", "MinBackward1", "AmaxBackward0", "AminBackward0"),
    *("VarBackward0", "StdBackward0", "VarMeanBackward0", "StdMeanBackward0", "SoftmaxBackward0"),
)
_DISTANCES = ("MmBackward0", "CdistBackward0", "EuclideanDistBackward0", "PdistBackward0")
_LAID_OUT = (
    *("TBackward0", "TransposeBackward0", "PermuteBackward0"),
    *("ToCopyBackward0", "ExpandBackward0", "ViewBackward0"),
)
"""By which a layer makes a parameter fit."""


def bent_among(terms: Sequence[Term], num_samples: int) -> str | None:
    """The name of a function of sums or means over samples that is not linear, if a loss of these terms has one; or of
    one that compares samples with one another."""
    ends = [term.node for term in terms]
    single = (term.node for term in terms if term.weights.numel() == 1)
    found = next((node for node in single if _is_bent(node, num_samples)), None) or _comparing(ends, num_samples)
    return found.name().partition("Backward")[0].lower() if found is not None else None


def _is_bent(node: Any, num_samples: int) -> bool:
    inputs = [inner for inner, _ in node.next_functions]
    if node.name() == QUOTIENT:
        return inputs[1] is not None and _adds_samples(inputs[1], num_samples)
    if node.name() in FACTORS:
        return all(inner is not None and _adds_samples(inner, num_samples) for inner in inputs)
    return node.name() in _BENT and _adds_samples(node if node.name() in _REDUCED else inputs[0], num_samples)


def _adds_samples(node: Any, num_samples: int) -> bool:
    """Whether it is computed from a sum or mean over as many rows as samples, by numbers alone."""
    left = [node]
    for _ in range(MOST_NODES):
        node = left.pop() if left else None
        if node is None:
            break
        inputs = [inner for inner, _ in node.next_functions if inner is not None and inner.name() != LEAF]
        if _reduces(node, inputs, num_samples) and any(map(is_of_data, inputs)):
            return True
        if _is_one(node):
            left += inputs
    return False


def _reduces(node: Any, inputs: Sequence[Any], num_samples: int) -> bool:
    rows = [shape[0] for inner in inputs if (shape := shape_after(inner))]
    if getattr(node, "_saved_reduction", None) in (MEAN, SUM):
        return any(count > 0 and count % num_samples == 0 for count in rows)
    return node.name() in _REDUCED and num_samples in rows


def _comparing(ends: Iterable[Any], num_samples: int) -> Any:
    """What compares samples between the loss and the last layer that has parameters."""
    left, seen = list(ends), set[Any]()
    while left and len(seen) < MOST_NODES:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        inputs = [inner for inner, _ in node.next_functions if inner is not None]
        if any(map(_is_of_parameter, inputs)):
            continue
        if _compares(node, inputs, num_samples):
            return node
        is_shifted = node.name() == "SubBackward0" and not _is_one(node)  # by one number for all: no softmax changes
        left += (inner for inner in inputs if not (is_shifted and _is_one(inner)))
    return None


def _is_one(node: Any) -> bool:
    return math.prod(shape_after(node)) == 1


def _is_of_parameter(node: Any) -> bool:
    while node.name() in _LAID_OUT and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return bool(node.name() == LEAF)


def _compares(node: Any, inputs: Sequence[Any], num_samples: int) -> bool:
    if node.name() in _DISTANCES:
        is_square = len(inputs) == 2 and shape_after(node) == (num_samples, num_samples)
        return is_square and all(map(is_of_data, inputs))
    if node.name() not in _COMPARING or shape_after(inputs[0])[:1] != (num_samples,):
        return False
    dims, rank = getattr(node, "_saved_dim", None), len(shape_after(inputs[0]))
    if rank > 1 and shape_after(node)[:1] == (num_samples,):
        return False  # there are as many samples still, or as many of something else
    return dims in (None, ()) or bool({0, 2**64 - rank} & set(dims if isinstance(dims, tuple) else [dims]))
