"""Collective operations on trees of arrays, whichever framework made them.

Dicts, lists, tuples, namedtuples and None are nodes. The leaves of one dtype lie in one flat tensor, which one
operation exchanges.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor

from paceline.comm.base import Collective
from paceline.comm.reduction import require_reducible
from paceline.errors import UsageError
from paceline.training.integer_means import average_integers, has_integer_mean
from paceline.training.leaves import Leaf, leaf_of

TreeOp = Literal["sum", "mean"]
_ALIGNED_BYTES = 64
"""Where JAX and TensorFlow take memory over as it is; elsewhere they copy it."""


def all_reduce_tree(collective: Collective, tree: Any, *, op: TreeOp) -> Any:
    """The sum or mean over all ranks, as a new tree. Collective call.

    Raises:
        UsageError: on every rank, naming the rank and the leaf's path, if trees differ in structure, dtype or shape, or
            a value cannot be exchanged.
    """
    is_known = op in ("sum", "mean")
    wrong = "" if is_known else f"all_reduce_tree takes op='sum' or op='mean', not {op!r}"
    leaves = _agreed(collective, f"all_reduce_tree(op={op!r})", tree, op if is_known else None, wrong=wrong)
    for flat in leaves.lay_out(are_read=True):
        if op == "mean" and has_integer_mean(flat):
            average_integers(collective, flat)
        else:
            collective.all_reduce(flat, op=op).wait()
    return leaves.like(tree)


def broadcast_tree(collective: Collective, tree: Any, *, root: int) -> Any:
    """The root's values, as a new tree. Collective call.

    Raises:
        UsageError: as `all_reduce_tree`, or there is no such root.
    """
    is_known = type(root) is int and 0 <= root < collective.size
    wrong = "" if is_known else f"broadcast_tree takes a root from 0 to {collective.size - 1}, not {root!r}"
    leaves = _agreed(collective, f"broadcast_tree(root={root!r})", tree, wrong=wrong)
    for flat in leaves.lay_out(are_read=collective.rank == root):
        collective.broadcast(flat, root=root)
    return leaves.like(tree)


@final
@dataclass
class _Leaves:
    """The leaves of a tree, in an order that dicts' insertion does not change, and where they lie while they travel."""

    leaves: list[Leaf] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)

    def lay_out(self, *, are_read: bool) -> list[Tensor]:
        """A flat tensor for each dtype, with the leaves' values if they `are_read`."""
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        starts = []
        for leaf in self.leaves:
            kind = (leaf.dtype, leaf.device)
            starts.append(sizes.get(kind, 0))
            aligned = _ALIGNED_BYTES // leaf.dtype.itemsize
            sizes[kind] = starts[-1] + -(-leaf.shape.numel() // aligned) * aligned
        flats = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in sizes.items()}
        for leaf, start in zip(self.leaves, starts, strict=True):
            flat = flats[leaf.dtype, leaf.device]
            piece = flat[start : start + leaf.shape.numel()].view(leaf.shape)
            if are_read:
                leaf.fill(piece)
            self.pieces.append(piece)
        return [flat for flat in flats.values() if flat.numel()]

    def like(self, tree: Any) -> Any:
        """A tree like this one, of what the pieces hold."""
        values = (leaf.like(piece) for leaf, piece in zip(self.leaves, self.pieces, strict=True))
        return _rebuilt(tree, values)


def _agreed(collective: Collective, operation: str, tree: Any, op: TreeOp | None = None, *, wrong: str) -> _Leaves:
    """The leaves of trees that agree on all ranks. Raises UsageError on every rank if there is anything to say, such as
    what is `wrong` with the call: a rank that raised alone would leave the others waiting."""
    forms, found = {"": operation}, _Leaves()
    problems = [wrong] if wrong else []
    for path, node in _nodes(tree, "tree"):
        try:
            forms[path] = _form(node)
            if _is_leaf(node):
                leaf = leaf_of(node)
                if op is not None:
                    _require_numbers(leaf, op)
                forms[path] = leaf.form
                found.leaves.append(leaf)
        except UsageError as error:
            forms[path] = f"what cannot be exchanged: {error}"
            problems.append(f"{operation}: {path}: {error}")
    digest = hashlib.sha256(repr(forms).encode()).digest()
    digests = collective.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    if any(not torch.equal(other, digests[0]) for other in digests):
        raise UsageError(_difference(collective.all_gather_object(forms)))
    if problems:
        raise UsageError(problems[0])
    return found


def _require_numbers(leaf: Leaf, op: TreeOp) -> None:
    if leaf.dtype == torch.bool:  # whose sum would be "or"
        raise UsageError("bools have no sum and no mean: give numbers, such as 0 and 1")
    try:
        require_reducible(op, leaf.dtype)
    except TypeError as error:
        raise UsageError(str(error)) from None


def _difference(forms: list[dict[str, str]]) -> str:
    """In words, the first path at which the first rank that differs from rank 0 does so."""
    first = forms[0]
    rank = next(rank for rank, theirs in enumerate(forms) if theirs != first)
    theirs = forms[rank]
    path = next(path for path in [*first, *theirs] if first.get(path) != theirs.get(path))
    return (
        f"trees differ between ranks{' at ' * bool(path)}{path}: rank 0 has {first.get(path, 'nothing there')}, "
        f"rank {rank} has {theirs.get(path, 'nothing there')}; give the same structure, dtypes and shapes on every rank"
    )


def _children(node: Any) -> list[tuple[str, Any]] | None:
    """A node's parts and what is added to the path for each; None for a leaf."""
    if isinstance(node, dict):
        return [(f"[{key!r}]", node[key]) for key in _keys(node)]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", part) for name, part in zip(node._fields, node, strict=True)]
    if isinstance(node, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(node)]
    return None


def _keys(node: dict[Any, Any]) -> list[Any]:
    return sorted(node, key=lambda key: (type(key).__qualname__, repr(key)))


def _form(node: Any) -> str:
    return "None" if node is None else f"a {type(node).__name__}"


def leaves_of(tree: Any) -> Iterator[Any]:
    """What is no node, in the order of `with_leaves`."""
    return (node for _, node in _nodes(tree, "") if _is_leaf(node))


def with_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree like this one, of what `change` makes of each leaf."""
    return _rebuilt(tree, map(change, leaves_of(tree)))


def _is_leaf(node: Any) -> bool:
    return node is not None and _children(node) is None


def _nodes(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every node and leaf with its path, a node before its parts."""
    yield path, node
    for step, part in _children(node) or ():
        yield from _nodes(part, path + step)


def _rebuilt(node: Any, values: Iterator[Any]) -> Any:
    if node is None:
        return None
    if isinstance(node, dict):
        parts = {key: _rebuilt(node[key], values) for key in _keys(node)}
        whole = copy.copy(node)  # in its own order, and with the default of a defaultdict
        for key, part in parts.items():  # not by update(), which in a Counter adds
            whole[key] = part
        return whole
    children = _children(node)
    if children is None:
        return next(values)
    rebuilt = [_rebuilt(part, values) for _, part in children]
    return type(node)(*rebuilt) if hasattr(node, "_fields") else type(node)(rebuilt)
