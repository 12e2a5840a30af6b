"""Tells by its graph whether a loss is something else than a linear function of what single samples lose."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.training.nodes import MEAN, MOST_NODES, SUM, is_of_data, shape_after, stacked_in
from paceline.training.sums import ADDED, FACTORS, LEAF, LINEAR, NORMS, PRODUCTS, QUOTIENT, SUMS, Term

_BENT = (
    *("SqrtBackward0", "RsqrtBackward0", "LogBackward0", "Log1PBackward0", "ExpBackward0", "PowBackward0"),
    *("ReciprocalBackward0", "AbsBackward0", "LogsumexpBackward0", *NORMS),
)
_MEANS = ("MeanBackward0", "MeanBackward1")
_REDUCED = (*SUMS, *PRODUCTS, *_MEANS, "LogsumexpBackward0", *NORMS)
_COMPARING = (
    *("TopkBackward0", "SortBackward0", "KthvalueBackward0", "MedianBackward0", "MedianBackward1"),
    *("MaxBackward0", "MaxBackward1", "MinBackward0", "MinBackward1", "AmaxBackward0", "AminBackward0"),
    *("VarBackward0", "StdBackward0", "VarMeanBackward0", "StdMeanBackward0", "SoftmaxBackward0"),
    "LogcumsumexpBackward0",
)
_PICKING = (
    *("MaxBackward0", "MaxBackward1", "MinBackward0", "MinBackward1", "AmaxBackward0", "AminBackward0"),
    *("MaximumBackward0", "MinimumBackward0", "LogsumexpBackward0", "SoftmaxBackward0"),
)
_DISTANCES = ("MmBackward0", "BmmBackward0", "CdistBackward0", "EuclideanDistBackward0", "PdistBackward0")
_BY_ELEMENT = (*FACTORS, QUOTIENT, *ADDED)
_TURNS = ("TBackward0", "TransposeBackward0")
_MOVES = (
    *("SliceBackward0", "IndexBackward0", "GatherBackward0", "IndexSelectBackward0", "SplitBackward0"),
    *("SplitWithSizesBackward0", "UnbindBackward0", "CatBackward0", "StackBackward0", "RepeatBackward0"),
    *("WhereBackward0", "MaskedFillBackward0", "DiagonalBackward0", "UnsafeSplitBackward0"),
    *("MaskedSelectBackward0", "TakeBackward0", "FlipBackward0", "RollBackward0", "ConstantPadNdBackward0"),
    *("IndexAddBackward0", "IndexCopyBackward0", "IndexPutBackward0", "ScatterBackward0", "ScatterAddBackward0"),
    *("DiagEmbedBackward0", "TrilBackward0", "TriuBackward0", "UnfoldBackward0", "torch::autograd::CopySlices"),
)
"""These move numbers to other places, and may add up those that come to the same one."""
_MOST_VIEWS = 4
"""A loss may compare so many rows of each sample. Most that tell a sample's views from others' have two."""
_LAID_OUT = (
    *("TBackward0", "TransposeBackward0", "PermuteBackward0"),
    *("ToCopyBackward0", "ExpandBackward0", "ViewBackward0"),
)
"""By which a layer makes a parameter fit."""


def bent_among(terms: Sequence[Term], num_samples: int) -> str | None:
    """The name of a function of sums or means over samples that is not linear, if a loss of these terms has one; or of
    one that compares samples with one another."""
    ends = [term.node for term in terms]
    single = [term.node for term in terms if term.weights.numel() == 1]
    picking = [node for node in single if _picks(node)]
    bent = [node for node in single if _is_bent(node, num_samples)] or picking[: len(picking) < num_samples]
    found = bent[0] if bent else _comparing(ends, num_samples)
    return found.name().partition("Backward")[0].lower() if found is not None else None


def _is_bent(node: Any, num_samples: int) -> bool:
    inputs = [inner for inner, _ in node.next_functions]
    if node.name() == QUOTIENT:
        return inputs[1] is not None and _adds_samples(inputs[1], num_samples)
    if node.name() in FACTORS:
        return all(inner is not None and _adds_samples(inner, num_samples) for inner in inputs)
    return node.name() in _BENT and _adds_samples(node if node.name() in _REDUCED else inputs[0], num_samples)


def _picks(node: Any) -> bool:
    """Whether it takes one of several losses, such as the largest of groups' means."""
    inputs = [inner for inner, _ in node.next_functions if inner is not None]
    losses = inputs if len(inputs) > 1 else stacked_in(inputs[0]) if inputs else []
    return node.name() in _PICKING and len(losses) > 1 and all(_is_one(each) and is_of_data(each) for each in losses)


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
    left, seen = [(node, False) for node in ends], set[Any]()
    while left and len(seen) < MOST_NODES:
        node, is_bent = place = left.pop()
        if place in seen:
            continue
        seen.add(place)
        inputs = [inner for inner, _ in node.next_functions if inner is not None]
        if any(map(_is_of_parameter, inputs)):
            continue
        if _compares(node, inputs, num_samples) or (is_bent and _adds_on(node, inputs, num_samples)):
            return node
        is_bent = is_bent or _bends(node, inputs)
        is_shifted = node.name() == "SubBackward0" and not _is_one(node)  # by one number for all: no softmax changes
        left += ((inner, is_bent) for inner in inputs if not (is_shifted and _is_one(inner)))
    return None


def _is_one(node: Any) -> bool:
    return math.prod(shape_after(node)) == 1


def _is_of_parameter(node: Any) -> bool:
    while node.name() in _LAID_OUT and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return bool(node.name() == LEAF)


def _compares(node: Any, inputs: Sequence[Any], num_samples: int) -> bool:
    if node.name() in (*_DISTANCES, *FACTORS, QUOTIENT):
        return _is_of_pairs(node, inputs, num_samples)
    return node.name() in _COMPARING and _is_along_samples(node, inputs, num_samples)


def _is_along_samples(node: Any, inputs: Sequence[Any], num_samples: int) -> bool:
    if shape_after(inputs[0])[:1] != (num_samples,):
        return False
    dims, shape = getattr(node, "_saved_dim", None), shape_after(inputs[0])
    if math.prod(shape[1:]) > 1 and shape_after(node)[:1] == (num_samples,):
        return False  # there are as many samples still, or as many of something else
    return dims in (None, ()) or bool({0, 2**64 - len(shape)} & set(dims if isinstance(dims, tuple) else [dims]))


def _is_of_pairs(node: Any, inputs: Sequence[Any], num_samples: int) -> bool:
    """Whether it has a number, or a row, for each pair of samples, or of their views."""
    is_distance, shape = node.name() in _DISTANCES, shape_after(node)
    if is_distance and shape[:1] == (1,):
        shape = shape[1:]  # as `einsum` has it
    if len(inputs) != 2 or len(shape) < 2 or not all(_are_samples(count, num_samples) for count in shape[:2]):
        return False
    if is_distance:
        return len(shape) == 2 and all(map(is_of_data, inputs))
    one, other = ((1, *before)[-len(shape) :] for before in map(_shape_before, inputs))
    are_across = {one[:2], other[:2]} == {(shape[0], 1), (1, shape[1])}
    return are_across and all(map(is_of_data, inputs))


def _shape_before(node: Any) -> tuple[int, ...]:
    """The shape that the tensor had before the script expanded it and, perhaps, divided it by its norms."""
    while node.name() in ("ExpandBackward0", QUOTIENT) and node.next_functions[0][0] is not None:
        if shape_after(inner := node.next_functions[0][0]) != shape_after(node):
            return shape_after(inner)
        node = inner
    return shape_after(node)


def _are_samples(count: int, num_samples: int) -> bool:
    return count % num_samples == 0 and 1 <= count // num_samples <= _MOST_VIEWS


def _bends(node: Any, inputs: Sequence[Any]) -> bool:
    """Whether it is no linear function of what is of data."""
    if node.name() == QUOTIENT:
        return any(inner is not None and is_of_data(inner) for inner, _ in node.next_functions[1:])
    if node.name() in (*FACTORS, *PRODUCTS):
        return len(inputs) > 1 and all(map(is_of_data, inputs))
    return node.name() not in (*LINEAR, *_MEANS, *_MOVES)


def _adds_on(node: Any, inputs: Sequence[Any], num_samples: int) -> bool:
    """Whether it adds up samples, pairs of them, or products of their features, as a covariance does."""
    if node.name() in ADDED:
        return _is_of_pairs(node, inputs, num_samples)
    if node.name() in (*SUMS, *_MEANS) and not _is_one(node):
        return _is_along_samples(node, inputs, num_samples) and is_of_data(node)
    if node.name() != "MmBackward0" or len(inputs) < 2 or not _are_samples(shape_after(inputs[0])[1], num_samples):
        return False
    return _is_turned(inputs[0]) and not _is_turned(inputs[1]) and all(map(is_of_data, inputs))


def _is_turned(node: Any) -> bool:
    """Whether its rows were columns."""
    is_turned = False
    while node.name() in (*_TURNS, *_BY_ELEMENT) and node.next_functions[0][0] is not None:
        is_turned ^= node.name() in _TURNS
        node = node.next_functions[0][0]
    return is_turned
