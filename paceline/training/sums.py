"""Tells by its graph whether a loss is a sum over the samples of its batch."""

import heapq
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.training.terms import MEAN, PASSED_THROUGH, SUM, is_any_packed, number_in, shape_after

_ONE_EACH = 0
"""Of `reduction`: a loss of torch's that gives one for each sample."""
_ADDED = ("AddBackward0", "SubBackward0")
_TURNED = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ExpandBackward0", "SelectBackward0")
_SUMS = ("SumBackward0", "SumBackward1", "NansumBackward0", "TraceBackward0", "CumsumBackward0")
_PRODUCTS = ("DotBackward0", "VdotBackward0", "MvBackward0", "MmBackward0", "BmmBackward0")
_FACTORS, _QUOTIENT = ("MulBackward0", "MulBackward1"), "DivBackward0"
_LINEAR = (*PASSED_THROUGH, *_ADDED, *_TURNED, *_SUMS, *_PRODUCTS, *_FACTORS, _QUOTIENT)
_NORMS = ("LinalgVectorNormBackward0", "DistBackward0")
_BENT = ("SqrtBackward0", "RsqrtBackward0", "LogBackward0", "Log1PBackward0", "ExpBackward0", "PowBackward0")
_BENT = (*_BENT, "ReciprocalBackward0", "AbsBackward0", "LogsumexpBackward0", *_NORMS)
_REDUCED = (*_SUMS, *_PRODUCTS, "MeanBackward0", "MeanBackward1", "LogsumexpBackward0", *_NORMS)
_WORDS = {"pow": "a squared norm", "bmm": "einsum() or bmm()", "nansum": "sum()"}
_LEAF, _STACKED = "torch::autograd::AccumulateGrad", "StackBackward0"
_MOST_NODES = 1000
_ROUNDING = 1e-3


class _Term(NamedTuple):
    """Where what a loss is made of by adding and by constant factors ends."""

    node: Any
    weights: Tensor
    """How much each element that it computed counts in the loss."""
    summed: str = ""
    """What adds these up, if anything does."""
    has_rows: bool = False
    """As many as samples are added up."""
    is_scaled: bool = False
    """As a whole."""
    is_divided: bool = False

    def joined(self, other: "_Term") -> "_Term":
        """The same node by both ways."""
        return _Term(
            self.node,
            self.weights + other.weights,
            self.summed or other.summed,
            self.has_rows or other.has_rows,
            self.is_scaled or other.is_scaled,
            self.is_divided or other.is_divided,
        )


class Look(NamedTuple):
    """What a loss is found to be."""

    summed: str | None
    """The name of the sum that it is, or has as a term: one of torch's losses; or sums of the script's own, if it has
    no other terms that nothing multiplies."""
    bent: str | None
    """The name of a function of sums or means over the samples that is not linear, if it has one as a term."""


def look_into(loss: Tensor, num_samples: int) -> Look:
    """To be asked before the backward pass, which frees what terms are multiplied by."""
    with torch.no_grad():
        terms = list(_terms_of(loss, num_samples))
    bent = next((term.node for term in terms if term.weights.numel() == 1 and _is_bent(term.node, num_samples)), None)
    name = bent.name().partition("Backward")[0].lower() if bent is not None else None
    return Look(_sum_among(terms, num_samples), name)


def _sum_among(terms: list[_Term], num_samples: int) -> str | None:
    for term in terms:
        if getattr(term.node, "_saved_reduction", None) == SUM and not (term.is_scaled or term.is_divided):
            return f"{term.node.name().removesuffix('Backward0')} with reduction='sum'"
    others = [term for term in terms if not (term.is_scaled or _is_product(term))]
    is_sum = bool(others) and all(_is_over_samples(term, num_samples) for term in others)
    return others[0].summed if is_sum else None


def _is_bent(node: Any, num_samples: int) -> bool:
    inputs = [inner for inner, _ in node.next_functions]
    if node.name() == _QUOTIENT:
        return inputs[1] is not None and _adds_samples(inputs[1], num_samples)
    if node.name() in _FACTORS:
        return all(inner is not None and _adds_samples(inner, num_samples) for inner in inputs)
    return node.name() in _BENT and _adds_samples(node if node.name() in _REDUCED else inputs[0], num_samples)


def _adds_samples(node: Any, num_samples: int) -> bool:
    """Whether it is computed from a sum or mean over as many rows as samples, by numbers alone."""
    left = [node]
    for _ in range(_MOST_NODES):
        node = left.pop() if left else None
        if node is None:
            break
        inputs = [inner for inner, _ in node.next_functions if inner is not None and inner.name() != _LEAF]
        is_loss = getattr(node, "_saved_reduction", None) in (MEAN, SUM)
        shapes = map(shape_after, inputs) if is_loss or node.name() in _REDUCED else ()
        if any(_is_of_samples(shape, num_samples) for shape in shapes):
            return True
        if math.prod(shape_after(node)) == 1:
            left += inputs
    return False


def _is_of_samples(shape: tuple[int, ...], num_samples: int) -> bool:
    return bool(shape) and shape[0] > 0 and shape[0] % num_samples == 0


def _is_product(term: _Term) -> bool:
    """Whether it is scaled by what has a gradient itself, or cannot be read."""
    return term.node.name() in _FACTORS and term.weights.numel() == 1


def _is_over_samples(term: _Term, num_samples: int) -> bool:
    """Whether as many rows as samples are added up, or what torch's losses give for each, and not averaged."""
    node, rows = term.node, term.weights.shape[:1]
    if not term.summed or term.is_divided or node.name() in (_QUOTIENT, _STACKED) or _is_mean_over_rows(node):
        return False  # what the script has stacked are losses, each with a mean of its own
    has_rows = term.has_rows or (node.name() != _LEAF and tuple(rows) == (num_samples,))
    is_one_each = getattr(node, "_saved_reduction", None) == _ONE_EACH and bool(rows) and rows[0] % num_samples == 0
    return (has_rows or is_one_each) and not _add_up_to_one(term.weights)


def _add_up_to_one(weights: Tensor) -> bool:
    """All, or those of samples, each of which has several alike."""
    sizes = weights.abs().flatten(1).double() if weights.dim() > 1 else weights.abs().double()[:, None]
    totals = float(sizes.sum()), float(sizes.amax(1).sum())
    is_mask = bool(((weights == 0) | (weights == 1)).all())
    return not is_mask and any(math.isclose(total, 1.0, rel_tol=_ROUNDING) for total in totals)


def _is_mean_over_rows(node: Any) -> bool:
    """Not over all that each row has, of which there are as many as samples still."""
    if node.name() != "MeanBackward1":
        return False
    dims, rank = node._saved_dim, len(node._saved_self_sym_sizes)
    return 0 in dims or 2**64 - rank in dims  # as nodes keep -rank


def _terms_of(loss: Tensor, num_samples: int) -> Iterator[_Term]:
    """Each once, from where the loss is down: a node comes after all that it goes into."""
    root = _Term(loss.grad_fn, torch.ones_like(loss))
    found, order, count = {root.node: root}, [(0, 0, root.node)], 0
    while order and count < _MOST_NODES:
        term = found.pop(heapq.heappop(order)[-1])
        inner = _inside(term, num_samples)
        if inner is None:
            yield term
        for each in inner or ():
            if each.node in found:
                found[each.node] = found[each.node].joined(each)
            else:
                found[each.node], count = each, count + 1
                heapq.heappush(order, (-each.node._sequence_nr(), count, each.node))


def _inside(term: _Term, num_samples: int) -> list[_Term] | None:
    """What a term is made of; none if it is made by no sum and no constant factor."""
    node, name = term.node, term.node.name()
    inputs = [inner for inner, _ in node.next_functions]
    given = [inner for inner in inputs if inner is not None]
    is_one = term.weights.numel() == 1
    if is_one and ((name in _PRODUCTS and len(given) == 2) or _is_squared_norm(node, given)):
        squared = given[0] if name in _PRODUCTS else given[0].next_functions[0][0]
        return [_found(term, squared, term.weights.reshape(()).expand(shape_after(squared)), num_samples)]
    if name not in _LINEAR or (len(given) > 1 and name not in _ADDED) or is_any_packed(node):
        return None
    if name in _PRODUCTS and tuple(term.weights.shape[:1]) == (num_samples,):
        return None  # of each row
    if name == "SelectBackward0" and given[0].name() != "CumsumBackward0" and math.prod(shape_after(given[0])) > 1:
        return None  # of several
    if name in (*_FACTORS, _QUOTIENT):
        term = _scaled(term, num_samples, is_whole=is_one)
    try:
        parts = node(term.weights)
    except RuntimeError:  # what an earlier pass has freed
        return None
    parts = parts if isinstance(parts, tuple) else (parts,)
    return [
        _found(term, inner, part, num_samples) for inner, part in zip(inputs, parts, strict=False) if inner is not None
    ]


def _found(term: _Term, inner: Any, weights: Tensor, num_samples: int) -> _Term:
    name = term.node.name()
    adds = name in _SUMS or weights.numel() > term.weights.numel()
    word = name.partition("Backward")[0].lower()
    summed = term.summed or (_WORDS.get(word, f"{word}()") if adds else "")
    has_rows = term.has_rows or (bool(summed) and tuple(weights.shape[:1]) == (num_samples,))
    return term._replace(node=inner, weights=weights, summed=summed, has_rows=has_rows)


def _scaled(term: _Term, num_samples: int, *, is_whole: bool) -> _Term:
    """What the script makes of a whole is as it wants it. Inside of a sum a factor divides if it is as small as that of
    a mean, and so does what each element is divided by."""
    node = term.node
    is_quotient = node.name() == _QUOTIENT
    if is_whole:
        return term._replace(is_divided=True) if is_quotient else term._replace(is_scaled=True)
    number = abs(number_in(node, "self" if node.next_functions[0][0] is None else "other"))
    divides = not number < num_samples if is_quotient else number * num_samples <= 1 + _ROUNDING
    return term._replace(is_divided=term.is_divided or divides)


def _is_squared_norm(node: Any, inputs: list[Any]) -> bool:
    if node.name() != "PowBackward0" or node._saved_exponent != 2 or inputs[0].name() not in _NORMS:
        return False
    order = getattr(inputs[0], "_saved_ord", getattr(inputs[0], "_saved_p", None))
    return order == 2 and inputs[0].next_functions[0][0] is not None
