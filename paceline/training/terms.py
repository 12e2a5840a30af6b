"""What the losses of a step add up, as their graphs tell: whether it is one term a sample."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

from paceline.training.nodes import MOST_NODES, PASSED_THROUGH, is_mean_over_rows, number_in, shape_after, stacked_in
from paceline.training.sums import FACTORS, QUOTIENT

_SCALED = (*FACTORS, QUOTIENT)
_CUTS = ("SelectBackward0", "SliceBackward0", "UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0")
_ALL_ADDED = ("SumBackward0", "SumBackward1")
_OF_CLASSES = "NllLoss"  # its input may be one sample's, with a row of classes and no more
_LEAST = 3
"""Fewer terms may be chance: a script may well have two losses and batches of two samples."""
_MEAN = 1.001
"""Factors that add up to one make a mean, but for rounding, as do those of one over the number of samples."""


class _Term(NamedTuple):
    name: str
    rows: int
    """Rows of what it was computed from, most often as many as samples; 1 for a single number."""
    cut_from: frozenset[int]
    """How long those were that it was cut out of."""
    factor: float
    """What the script multiplies it by."""


class Pass(NamedTuple):
    terms: list[_Term]
    are_apart: bool
    """Whether terms share nothing but parameters."""


def pass_of(begun: Sequence[Any]) -> Pass:
    """What a backward pass adds up that is to begin at losses with these graphs. To be asked before the pass, which
    frees what terms are multiplied by. Keeps no node: it may hold a step's activations."""
    found = [_described(node) for root in begun for node in terms_of(root)]
    return Pass([term for term, _ in found], _share_nothing([nodes for _, nodes in found]))


@final
class Terms:
    """Remembers what backward passes began at."""

    def __init__(self) -> None:
        self._passes: list[Pass] = []

    def add_pass(self, under_way: Pass) -> None:
        self._passes.append(under_way)

    def are_one_a_sample(self, num_samples: int) -> bool:
        """Whether the last pass began at a sum with a term cut out of the batch for each of so many samples; or at
        several such, of as many kinds."""
        terms = self._passes[-1].terms if self._passes else ()
        kinds = [[term for term in terms if term.name == name] for name in {term.name for term in terms}]
        return bool(kinds) and all(_are_of_samples(kind, num_samples) for kind in kinds)

    def are_apart(self, num_samples: int) -> bool:
        """Whether a pass began at a sum of so many terms, each computed apart from the others: from a sample each, as
        it seems, or by a model each."""
        return any(
            each.are_apart and _are_unscaled(each.terms) and _are_as_many(each.terms, num_samples)
            for each in self._passes
        )

    def are_parts(self, num_samples: int) -> bool:
        """Whether each pass was of a part of so many samples, and together they were of all."""
        firsts = [each.terms[0] for each in self._passes if each.terms]
        if len(firsts) < max(_LEAST, len(self._passes)) or not (_are_alike(firsts) and _are_unscaled(firsts)):
            return False
        rows = [term.rows for term in firsts]
        return max(rows) < num_samples and (sum(rows) == num_samples or len(rows) == num_samples)


def is_cut_from(node: Any, num_samples: int) -> bool:
    """Whether it is computed from one of so many samples, cut out of their batch."""
    term, _ = _described(node)
    return num_samples in term.cut_from and term.rows != num_samples


def terms_of(node: Any) -> Iterator[Any]:
    """The graphs of what a sum adds up, also of what the script has stacked; of anything else, itself. A sum that is
    added up twice is looked into once."""
    left, seen = [node], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name() in PASSED_THROUGH:
            seen.add(node)
            left += [inner for inner, _ in reversed(node.next_functions)]
        elif node.name() in _ALL_ADDED and (stacked := stacked_in(node.next_functions[0][0])):
            left += reversed(stacked)
        else:
            yield node


def _are_of_samples(terms: Sequence[_Term], num_samples: int) -> bool:
    """Whether there is one for each sample, cut out of the batch, and no factors make a mean of them."""
    if not _are_as_many(terms, num_samples) or not all(num_samples in term.cut_from for term in terms):
        return False
    factors = [abs(term.factor) for term in terms]
    return max(factors) * num_samples > _MEAN and not math.isclose(sum(factors), 1.0, rel_tol=_MEAN - 1)


def _are_as_many(terms: Sequence[_Term], num_samples: int) -> bool:
    """Whether there is a term a sample, and none is of the whole batch."""
    if len(terms) != num_samples or num_samples < _LEAST or not _are_alike(terms):
        return False
    return all(term.rows != num_samples for term in terms)


def _share_nothing(graphs: Sequence[set[Any]]) -> bool:
    if any(len(nodes) >= MOST_NODES for nodes in graphs):
        return False  # what they share may lie further down
    return len(set[Any]().union(*graphs)) == sum(map(len, graphs))


def _are_alike(terms: Sequence[_Term]) -> bool:
    """Whether all are the same kind of loss, and none is divided, or multiplied by what nothing tells."""
    return len({term.name for term in terms}) == 1 and terms[0].name not in _SCALED


def _are_unscaled(terms: Sequence[_Term]) -> bool:
    return all(term.factor == 1.0 for term in terms)


def _described(node: Any) -> tuple[_Term, set[Any]]:
    """The term, and the nodes of its graph, but for parameters, up to where it was cut out of a whole batch."""
    node, factor = _without_factor(node)
    inputs = [inner for inner, _ in node.next_functions if inner is not None]
    shape = shape_after(inputs[0]) if inputs else ()
    is_single = not shape or (len(shape) == 1 and node.name().startswith(_OF_CLASSES))
    nodes, lengths, left = {node}, set(), list(inputs)
    if _is_cut(node):  # a sample's loss, out of those of the batch
        is_single, left = True, []
        lengths.update(_length_before(node))
    while left and len(nodes) < MOST_NODES:
        inner = left.pop()
        if inner in nodes or inner.name().endswith("AccumulateGrad"):
            continue
        if _is_cut(inner):
            lengths.update(_length_before(inner))
            continue
        nodes.add(inner)
        left += [other for other, _ in inner.next_functions if other is not None]
    return _Term(node.name(), 1 if is_single else shape[0], frozenset(lengths), factor), nodes


def _without_factor(node: Any) -> tuple[Any, float]:
    """What one number multiplies, and that number."""
    if node.name() in FACTORS and None in (inputs := [inner for inner, _ in node.next_functions]):
        factor = number_in(node, "other" if inputs[0] is not None else "self")
        if not math.isnan(factor):
            return _behind(next(inner for inner in inputs if inner is not None), PASSED_THROUGH), factor
    return node, 1.0


def _behind(node: Any, names: Sequence[str]) -> Any:
    """What nodes of these names, of one input each, are computed from."""
    while node.name() in names and len(inputs := [inner for inner, _ in node.next_functions if inner]) == 1:
        node = inputs[0]
    return node


def _is_cut(node: Any) -> bool:
    return node.name() in _CUTS and getattr(node, "_saved_dim", -1) == 0


def _length_before(cut: Any) -> list[int]:
    """The length of what it is cut out of; none of as many means over the batch as there are samples, as one a task."""
    sizes = getattr(cut, "_saved_self_sym_sizes", ())
    length = int(sizes[0]) if sizes else len(getattr(cut, "_input_metadata", ()))  # `unbind` gives as many
    mean = _behind(cut.next_functions[0][0], (*PASSED_THROUGH, *_SCALED))
    return [] if is_mean_over_rows(mean) and mean._saved_self_sym_sizes[0] == length else [length]
