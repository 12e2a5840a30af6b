"""Tells by its graph whether a loss is a sum over the samples of its batch."""

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.training.nodes import (
    MOST_NODES,
    PASSED_THROUGH,
    SUM,
    is_any_packed,
    is_mean_over_rows,
    is_of_data,
    number_in,
    shape_after,
    stacked_in,
)

_ONE_EACH = 0
"""The `reduction` of a loss of torch's that gives one loss for each sample."""
ADDED = ("AddBackward0", "SubBackward0")
_TURNED = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ExpandBackward0", "SelectBackward0")
SUMS = ("SumBackward0", "SumBackward1", "NansumBackward0", "TraceBackward0", "CumsumBackward0")
PRODUCTS = ("DotBackward0", "VdotBackward0", "MvBackward0", "MmBackward0", "BmmBackward0")
FACTORS, QUOTIENT = ("MulBackward0", "MulBackward1"), "DivBackward0"
LINEAR = (*PASSED_THROUGH, *ADDED, *_TURNED, *SUMS, *PRODUCTS, *FACTORS, QUOTIENT)
NORMS = ("LinalgVectorNormBackward0", "DistBackward0")
_WORDS = {"pow": "a squared norm", "bmm": "einsum() or bmm()", "nansum": "sum()"}
LEAF, _STACKED = "torch::autograd::AccumulateGrad", "StackBackward0"
_ROUNDING = 1e-3
"""How far numbers may be apart: so much, or twice the rounding of their type, such as bfloat16, if that is more."""
_MUCH = 0.5


class Term(NamedTuple):
    """Where what a loss is made of by adding and by constant factors ends."""

    node: Any
    weights: Tensor
    """How much each element that it computed counts in the loss."""
    output: int = 0
    """Which of those that the node has."""
    rounding: float = _ROUNDING
    summed: str = ""
    """What adds these up, if anything does."""
    has_rows: bool = False
    """As many as samples are added up."""
    is_scaled: bool = False
    """As a whole."""
    is_divided: bool = False

    def joined(self, other: "Term") -> "Term":
        """The same output by both ways."""
        return Term(
            self.node,
            self.weights + other.weights,
            self.output,
            max(self.rounding, other.rounding),
            self.summed or other.summed,
            self.has_rows or other.has_rows,
            self.is_scaled or other.is_scaled,
            self.is_divided or other.is_divided,
        )


def terms_in(loss: Tensor, num_samples: int, size: int) -> list[Term]:
    """What the loss of one of `size` workers is made of. To be asked before the backward pass, which frees what terms
    are multiplied by."""
    with torch.no_grad():
        return list(_terms_of(loss, num_samples, size))


def sum_among(terms: Sequence[Term], num_samples: int) -> str | None:
    """The name of the sum that a loss of these terms is, or has as a term. That is one of torch's losses; or a sum of
    the script's own, if no other term is without a factor."""
    for term in terms:
        if _is_torchs_sum(term) and not term.is_scaled:
            return f"{term.node.name().removesuffix('Backward0')} with reduction='sum'"
    others = [term for term in terms if not (term.is_scaled or _is_product(term) or _is_added_to_each(term))]
    is_sum = bool(others) and all(_is_over_samples(term, num_samples) for term in others)
    return others[0].summed if is_sum else None


def multiplied_sum_among(terms: Sequence[Term], num_samples: int, size: int) -> float | None:
    """The least factor of torch's own sums, or else of the script's, if it is too much for one over the number of
    samples. It may be one, beside terms of another kind; a half, as of squares; or the scale of a GradScaler. The
    number of workers is no such factor."""
    sums = [term for term in terms if term.is_scaled and _is_torchs_sum(term)]
    sums = sums or [term for term in terms if _is_over_samples(term, num_samples)]
    least = min((float(term.weights.abs().max()) for term in sums), default=0.0)
    return least if least >= _MUCH and least != size else None


def _is_torchs_sum(term: Term) -> bool:
    has_summed = getattr(term.node, "_saved_reduction", None) == SUM
    return has_summed and not term.is_divided and is_of_data(term.node)


def _is_added_to_each(term: Term) -> bool:
    """Whether it is one number that the script adds to what each sample loses."""
    return term.has_rows and term.weights.numel() == 1


def _is_product(term: Term) -> bool:
    """Whether it is scaled by what has a gradient itself, or cannot be read."""
    return term.node.name() in FACTORS and term.weights.numel() == 1


def _is_unread(node: Any) -> bool:
    """Whether it is divided by what cannot be read."""
    return bool(node.name() == QUOTIENT) and node.next_functions[1][0] is None


def _is_over_samples(term: Term, num_samples: int) -> bool:
    """Whether as many rows as samples are added up, or what torch's losses give for each, and not averaged."""
    node, rows = term.node, term.weights.shape[:1]
    if not term.summed or term.is_divided or _is_unread(node) or is_mean_over_rows(node):
        return False
    if node.name() == _STACKED or stacked_in(node):
        return False  # what the script has stacked are losses, each with a mean of its own
    if not term.weights.dim() or not term.weights.numel():
        return False  # one number, as often as there are samples
    has_rows = term.has_rows or (node.name() != LEAF and tuple(rows) == (num_samples,))
    is_one_each = getattr(node, "_saved_reduction", None) == _ONE_EACH and bool(rows) and rows[0] % num_samples == 0
    if not (has_rows or is_one_each) or _add_up_to_one(term.weights, term.rounding):
        return False
    return is_of_data(node) and not _is_weighted_by_data(node)


def _is_weighted_by_data(node: Any) -> bool:
    """Whether it is a product of what is computed from data by two ways, such as losses and weights; of no squares."""
    inputs = _inputs_of(node)
    if node.name() not in (*FACTORS, *PRODUCTS) or len(inputs) < 2 or len(set(map(_source_of, inputs))) == 1:
        return False
    return all(is_of_data(inner) for inner, _ in inputs)


def _source_of(place: tuple[Any, int]) -> tuple[Any, int]:
    """Where a tensor comes from that is turned, or has constants added."""
    while place[0].name() in (*PASSED_THROUGH, *_TURNED) and len(inputs := _inputs_of(place[0])) == 1:
        place = inputs[0]
    return place


def _inputs_of(node: Any) -> list[tuple[Any, int]]:
    """The inputs that have a gradient: each a node and the number of its output."""
    return [place for place in node.next_functions if place[0] is not None]


def _add_up_to_one(weights: Tensor, rounding: float) -> bool:
    """All, or those of samples, each of which has several alike."""
    sizes = weights.abs().double().reshape(len(weights), -1)
    totals = float(sizes.sum()), float(sizes.amax(1).sum())
    is_mask = bool(((weights == 0) | (weights == 1)).all())
    return not is_mask and any(math.isclose(total, 1.0, rel_tol=rounding) for total in totals)


def _terms_of(loss: Tensor, num_samples: int, size: int) -> Iterator[Term]:
    """Each once, from where the loss is down: a node comes after all that it goes into, and leaves last."""
    root = Term(loss.grad_fn, torch.ones_like(loss), loss.output_nr)
    found, order, count = {(root.node, root.output): root}, [(0, 0, (root.node, root.output))], 0
    while order and count < MOST_NODES:
        term = found.pop(heapq.heappop(order)[-1])
        inner = _inside(term, num_samples, size)
        if inner is None:
            yield term
        for each in inner or ():
            place = each.node, each.output
            if place in found:
                found[place] = found[place].joined(each)
            else:
                found[place], count = each, count + 1
                turn = 1 if each.node.name() == LEAF else -each.node._sequence_nr()
                heapq.heappush(order, (turn, count, place))


def _inside(term: Term, num_samples: int, size: int) -> list[Term] | None:
    """What a term is made of; none if it is made by no sum and no constant factor."""
    node, name = term.node, term.node.name()
    given = _inputs_of(node)
    is_one = term.weights.numel() == 1
    is_product = is_one and name in PRODUCTS and len(given) == 2 and not _is_weighted_by_data(node)
    if is_product or (is_one and _is_squared_norm(node, given)):
        squared = given[0] if is_product else _inputs_of(given[0][0])[0]
        return [_found(term, squared, term.weights.reshape(()).expand(shape_after(*squared)), num_samples)]
    if name not in LINEAR or (len(given) > 1 and name not in ADDED) or is_any_packed(node):
        return None
    if name in PRODUCTS and tuple(term.weights.shape[:1]) == (num_samples,):
        return None  # of each row
    if name == "SelectBackward0" and given[0][0].name() != "CumsumBackward0" and math.prod(shape_after(*given[0])) > 1:
        return None  # of several
    if name in (*FACTORS, QUOTIENT):
        term = _scaled(term, num_samples, size, is_whole=is_one)
    try:
        parts = node(term.weights)
        placed = zip(node.next_functions, parts if isinstance(parts, tuple) else (parts,), strict=False)
        summed = [(place, part.sum_to_size(shape_after(*place))) for place, part in placed if place[0] is not None]
    except RuntimeError:  # what an earlier pass has freed, or nested tensors
        return None
    return [_found(term, place, part, num_samples) for place, part in summed]


def _found(term: Term, place: tuple[Any, int], weights: Tensor, num_samples: int) -> Term:
    name = term.node.name()
    adds = name in SUMS or weights.numel() > term.weights.numel()
    word = name.partition("Backward")[0].lower()
    summed = term.summed or (_WORDS.get(word, f"{word}()") if adds else "")
    has_rows = term.has_rows or (bool(summed) and tuple(weights.shape[:1]) == (num_samples,))
    rounding = max(term.rounding, 2 * torch.finfo(weights.dtype).eps)
    node, output = place
    return term._replace(node=node, output=output, weights=weights, rounding=rounding, summed=summed, has_rows=has_rows)


def _scaled(term: Term, num_samples: int, size: int, *, is_whole: bool) -> Term:
    """What the script makes of a whole is as it wants it; it may divide by what all workers' batches have. Inside of a
    sum a factor divides if it is as small as that of a mean, and so does what each element is divided by."""
    node = term.node
    is_quotient = node.name() == QUOTIENT
    number = abs(number_in(node, "self" if node.next_functions[0][0] is None else "other"))
    if is_quotient:
        return term._replace(is_divided=term.is_divided or is_whole or not number < num_samples)
    is_share = is_whole and number < _MUCH and number * num_samples < size  # of batches that differ in length
    divides = is_share or number * num_samples <= 1 + term.rounding
    return term._replace(is_divided=term.is_divided or divides, is_scaled=term.is_scaled or is_whole)


def _is_squared_norm(node: Any, inputs: Sequence[tuple[Any, int]]) -> bool:
    if node.name() != "PowBackward0" or node._saved_exponent != 2 or inputs[0][0].name() not in NORMS:
        return False
    norm = inputs[0][0]
    return getattr(norm, "_saved_ord", getattr(norm, "_saved_p", None)) == 2 and bool(_inputs_of(norm))
