"""What the losses of a step add up, as their graphs tell: whether it is one term a sample."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import torch

SHAPED = ("ViewBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1")
PASSED_THROUGH = (
    *("AddBackward0", "SubBackward0", "RsubBackward1", "NegBackward0", "ToCopyBackward0", "CloneBackward0"),
    *SHAPED,
)
MEAN, SUM = 1, 2
"""Of `reduction`, as torch's losses keep it for their backward pass."""
SCALED = ("MulBackward0", "MulBackward1", "DivBackward0")
_CUTS = ("SelectBackward0", "SliceBackward0", "UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0")
_OF_CLASSES = "NllLoss"  # its input may be one sample's, with a row of classes and no more
_LEAST = 3
"""So many terms are no chance: a script may well have two losses and batches of two samples."""
_MOST_NODES = 1000


class _Term(NamedTuple):
    name: str
    rows: int
    """Of what it was computed from, most often as many as samples; 1 for a single number."""
    nodes: frozenset[Any]
    """Of its graph, but for parameters, up to where it was cut out of a whole batch."""
    cut_from: frozenset[int]
    """How long those were that it was cut out of."""


@final
class Terms:
    """Remembers what backward passes began at."""

    def __init__(self) -> None:
        self._passes: list[list[_Term]] = []

    def add_pass(self, begun: Sequence[Any]) -> None:
        """A backward pass of losses with these graphs is under way."""
        self._passes.append([_described(node) for root in begun for node in terms_of(root)])

    def are_one_a_sample(self, num_samples: int) -> bool:
        """Whether the last pass began at a sum with a term cut out of the batch for each of so many samples."""
        terms = self._passes[-1] if self._passes else ()
        return _are_as_many(terms, num_samples) and all(num_samples in term.cut_from for term in terms)

    def are_apart(self, num_samples: int) -> bool:
        """Whether a pass began at a sum of so many terms, each computed apart from the others: from a sample each, as
        it seems, or by a model each."""
        return any(_are_as_many(terms, num_samples) and _share_nothing(terms) for terms in self._passes)

    def are_parts(self, num_samples: int) -> bool:
        """Whether each pass was of a part of so many samples, and together they were of all."""
        firsts = [terms[0] for terms in self._passes if terms]
        if len(firsts) < max(_LEAST, len(self._passes)) or not _are_alike(firsts):
            return False
        rows = [term.rows for term in firsts]
        return max(rows) < num_samples and (sum(rows) == num_samples or len(rows) == num_samples)


def terms_of(node: Any) -> Iterator[Any]:
    """The graphs of what a sum adds up; of anything else, itself. A sum that is added up twice is looked into once."""
    left, seen = [node], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name() in PASSED_THROUGH:
            seen.add(node)
            left += [inner for inner, _ in reversed(node.next_functions)]
        else:
            yield node


def _are_as_many(terms: Sequence[_Term], num_samples: int) -> bool:
    """Whether there is an unscaled term a sample, and none is of the whole batch."""
    if len(terms) != num_samples or num_samples < _LEAST or not _are_alike(terms):
        return False
    return all(term.rows != num_samples for term in terms)


def _share_nothing(terms: Sequence[_Term]) -> bool:
    if any(len(term.nodes) >= _MOST_NODES for term in terms):
        return False  # what they share may lie further down
    return len(frozenset[Any]().union(*(term.nodes for term in terms))) == sum(len(term.nodes) for term in terms)


def _are_alike(terms: Sequence[_Term]) -> bool:
    """Whether all are the same kind of loss, and none is scaled."""
    return len({term.name for term in terms}) == 1 and terms[0].name not in SCALED


def _described(node: Any) -> _Term:
    inputs = [inner for inner, _ in node.next_functions if inner is not None]
    shape = shape_after(inputs[0]) if inputs else ()
    is_single = not shape or (len(shape) == 1 and node.name().startswith(_OF_CLASSES))
    nodes, lengths, left = {node}, set(), list(inputs)
    if _is_cut(node):  # a sample's loss, out of those of the batch
        is_single, left = True, []
        lengths.add(_length_before(node))
    while left and len(nodes) < _MOST_NODES:
        inner = left.pop()
        if inner in nodes or inner.name().endswith("AccumulateGrad"):
            continue
        if _is_cut(inner):
            lengths.add(_length_before(inner))
            continue
        nodes.add(inner)
        left += [other for other, _ in inner.next_functions if other is not None]
    return _Term(node.name(), 1 if is_single else shape[0], frozenset(nodes), frozenset(lengths))


def _is_cut(node: Any) -> bool:
    return node.name() in _CUTS and getattr(node, "_saved_dim", -1) == 0


def shape_after(node: Any) -> tuple[int, ...]:
    """Of what the node's operation computed. What it has saved may be gone by now."""
    found = getattr(node, "_input_metadata", ())
    return tuple(found[0].shape) if found else ()


def _length_before(cut: Any) -> int:
    if sizes := getattr(cut, "_saved_self_sym_sizes", ()):
        return int(sizes[0])
    return len(getattr(cut, "_input_metadata", ()))  # of `unbind`, which gives as many


TELLS_PACKED = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Which torch has not always done."""


def number_in(node: Any, name: str) -> float:
    """That a node has saved; NaN if it has not."""
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
