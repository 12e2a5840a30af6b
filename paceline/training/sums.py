"""Tells by its graph whether a loss is a sum over the samples of its batch."""

from typing import Any

from paceline.training.terms import SHAPED, SUM, shape_after, terms_of

_ONE_EACH = 0
"""Of `reduction`: a loss of torch's that gives one for each sample."""
_SUMS = ("SumBackward0", "SumBackward1", "NansumBackward0")
_WEIGHTED = ("MulBackward0", "MulBackward1")
"""Beside a term that is a sum, most often another one, as in `a.sum() - 0.5 * b.sum()`."""
_DIVIDED = ("DivBackward0", "StackBackward0")
"""What the script has divided is as it wants it; what it has stacked are losses, each with a mean of its own."""


def sum_in(node: Any, num_samples: int) -> str | None:
    """The name of the sum that the loss with this graph is, or has as a term: one of torch's losses; or sums of the
    script's own, if it has no other terms that nothing multiplies."""
    terms = list(terms_of(node))
    summed = next((term for term in terms if getattr(term, "_saved_reduction", None) == SUM), None)
    if summed is not None:
        return f"{summed.name().removesuffix('Backward0')} with reduction='sum'"
    others = [term for term in terms if term.name() not in _WEIGHTED]
    return "sum()" if others and all(_is_over_samples(term, num_samples) for term in others) else None


def _is_over_samples(node: Any, num_samples: int) -> bool:
    """Whether it adds up as many rows as samples, in one or several sums, or what torch's losses give for each."""
    if node.name() not in _SUMS:
        return False
    has_rows = False
    while node is not None and node.name() in (*_SUMS, *SHAPED):
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        has_rows = has_rows or tuple(sizes[:1]) == (num_samples,)
        node = next((inner for inner, _ in node.next_functions if inner is not None), None)
    if node is None or node.name() in _DIVIDED or _is_mean_over_rows(node):
        return False
    rows = shape_after(node)[:1]
    is_one_each = getattr(node, "_saved_reduction", None) == _ONE_EACH
    return has_rows or rows == (num_samples,) or (is_one_each and bool(rows) and rows[0] % num_samples == 0)


def _is_mean_over_rows(node: Any) -> bool:
    """Not over all that each row has, of which there are as many as samples still."""
    if node.name() != "MeanBackward1":
        return False
    dims, rank = node._saved_dim, len(node._saved_self_sym_sizes)
    return 0 in dims or 2**64 - rank in dims  # as nodes keep -rank
