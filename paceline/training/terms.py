"""What the losses of a step add up, as their graphs tell: whether it is one term a sample."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

from paceline.training.nodes import MOST_NODES, PASSED_THROUGH, shape_after, stacked_in

SCALED = ("MulBackward0", "MulBackward1", "DivBackward0")
_CUTS = ("SelectBackward0", "SliceBackward0", "UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0")
_ALL_ADDED = ("SumBackward0", "SumBackward1")
_OF_CLASSES = "NllLoss"  # its input may be one sample's, with a row of classes and no more
_LEAST = 3
"""So many terms are no chance: a script may well have two losses and batches of two samples."""


class _Term(NamedTuple):
    name: str
    rows: int
    """Of what it was computed from, most often as many as samples; 1 for a single number."""
    cut_from: frozenset[int]
    """How long those were that it was cut out of."""


class _Pass(NamedTuple):
    terms: list[_Term]
    are_apart: bool
    """They share nothing but parameters."""


@final
class Terms:
    """Remembers what backward passes began at."""

    def __init__(self) -> None:
        self._passes: list[_Pass] = []

    def add_pass(self, begun: Sequence[Any]) -> None:
        """A backward pass of losses with these graphs is under way. Keeps no node: it may hold a step's activations."""
        found = [_described(node) for root in begun for node in terms_of(root)]
        self._passes.append(_Pass([term for term, _ in found], _share_nothing([nodes for _, nodes in found])))

    def are_one_a_sample(self, num_samples: int) -> bool:
        """Whether the last pass began at a sum with a term cut out of the batch for each of so many samples."""
        terms = self._passes[-1].terms if self._passes else ()
        return _are_as_many(terms, num_samples) and all(num_samples in term.cut_from for term in terms)

    def are_apart(self, num_samples: int) -> bool:
        """Whether a pass began at a sum of so many terms, each computed apart from the others: from a sample each, as
        it seems, or by a model each."""
        return any(each.are_apart and _are_as_many(each.terms, num_samples) for each in self._passes)

    def are_parts(self, num_samples: int) -> bool:
        """Whether each pass was of a part of so many samples, and together they were of all."""
        firsts = [each.terms[0] for each in self._passes if each.terms]
        if len(firsts) < max(_LEAST, len(self._passes)) or not _are_alike(firsts):
            return False
        rows = [term.rows for term in firsts]
        return max(rows) < num_samples and (sum(rows) == num_samples or len(rows) == num_samples)


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


def _are_as_many(terms: Sequence[_Term], num_samples: int) -> bool:
    """Whether there is an unscaled term a sample, and none is of the whole batch."""
    if len(terms) != num_samples or num_samples < _LEAST or not _are_alike(terms):
        return False
    return all(term.rows != num_samples for term in terms)


def _share_nothing(graphs: Sequence[set[Any]]) -> bool:
    if any(len(nodes) >= MOST_NODES for nodes in graphs):
        return False  # what they share may lie further down
    return len(set[Any]().union(*graphs)) == sum(map(len, graphs))


def _are_alike(terms: Sequence[_Term]) -> bool:
    """Whether all are the same kind of loss, and none is scaled."""
    return len({term.name for term in terms}) == 1 and terms[0].name not in SCALED


def _described(node: Any) -> tuple[_Term, set[Any]]:
    """The term, and the nodes of its graph, but for parameters, up to where it was cut out of a whole batch."""
    inputs = [inner for inner, _ in node.next_functions if inner is not None]
    shape = shape_after(inputs[0]) if inputs else ()
    is_single = not shape or (len(shape) == 1 and node.name().startswith(_OF_CLASSES))
    nodes, lengths, left = {node}, set(), list(inputs)
    if _is_cut(node):  # a sample's loss, out of those of the batch
        is_single, left = True, []
        lengths.add(_length_before(node))
    while left and len(nodes) < MOST_NODES:
        inner = left.pop()
        if inner in nodes or inner.name().endswith("AccumulateGrad"):
            continue
        if _is_cut(inner):
            lengths.add(_length_before(inner))
            continue
        nodes.add(inner)
        left += [other for other, _ in inner.next_functions if other is not None]
    return _Term(node.name(), 1 if is_single else shape[0], frozenset(lengths)), nodes


def _is_cut(node: Any) -> bool:
    return node.name() in _CUTS and getattr(node, "_saved_dim", -1) == 0


def _length_before(cut: Any) -> int:
    if sizes := getattr(cut, "_saved_self_sym_sizes", ()):
        return int(sizes[0])
    return len(getattr(cut, "_input_metadata", ()))  # of `unbind`, which gives as many
