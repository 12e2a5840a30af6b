"""All-reduce up and down two binary trees: few rounds, and every link carries about the same."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.algorithms.partial_sum import PartialSum, SumOrMean, as_flat, divisor_of
from paceline.comm.algorithms.pieces import chunks_of, pieces_of, wait_for
from paceline.comm.base import Collective, Work


def tree(collective: Collective, tensor: Tensor, *, op: SumOrMean = "mean") -> None:
    """As `AllReduceAlgorithm`; half of the tensor is reduced and broadcast along each of two trees.

    A rank that has children in one tree is a leaf of the other, so that none is idle and none is loaded twice (Sanders,
    Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12),
    2009). A rank sends at most 2 times the tensor, in 2 log2(n) rounds; among an odd number of ranks rank 0 has
    children in both trees and sends 2.5 times the tensor. The rounds of a large tensor overlap, piece by piece.

    Half precision is rounded once at each level of a tree.
    """
    flat = as_flat(tensor, op)
    if collective.size == 1:
        return
    places = _places(collective.rank, collective.size)
    halves = [pieces_of(half) for half in chunks_of(flat, 2)]
    # On the way up a rank begins with the tree in which it is a leaf and waits for nobody; on the way back it ends with
    # that. If the trees took turns, each would wait for the other (40 MB among 8 ranks on simulated links of 1 Gbit/s:
    # 3.1 s instead of 0.9 s). Where rank 0 is no leaf the second tree comes first: of 3 ranks, one sends it both
    # trees' messages in that order.
    backwards = zip(reversed(places), reversed(halves), strict=True)
    trees = sorted(backwards, key=lambda tree: bool(tree[0].children))
    up = [(place, piece) for place, pieces in trees for piece in pieces]
    down = [(place, piece) for place, pieces in reversed(trees) for piece in pieces]
    receiving = [[_receive(collective, piece, child) for child in place.children] for place, piece in up]
    sending: list[Work] = []
    for (place, piece), from_children in zip(up, receiving, strict=True):
        total = PartialSum(piece)
        for part, work in from_children:
            work.wait()
            total.add(part)
        total.store(divisor=divisor_of(op, size=collective.size) if place.parent is None else 1)
        if place.parent is not None:
            sending.append(collective.send(piece, destination=place.parent))
    # The result overwrites the sum, which the parent has taken by then.
    returning = [None if place.parent is None else collective.recv(piece, source=place.parent) for place, piece in down]
    for (place, piece), result in zip(down, returning, strict=True):
        if result is not None:
            result.wait()
        sending.extend(collective.send(piece, destination=child) for child in place.children)
    wait_for(sending)


@dataclass(frozen=True)
class _Place:
    """A rank's neighbours in one tree."""

    parent: int | None
    children: tuple[int, ...]


def edges(size: int) -> list[list[tuple[int, int]]]:
    """Parent and child, as ranks, of every edge; of each of the two trees."""
    # In the second tree the ranks are numbered so that odd ones, the leaves of the first, have even positions.
    second = (size - 1, -1) if size % 2 == 0 else (-1, 1)
    found = []
    for offset, direction in ((0, 1), second):  # rank r has position offset + direction * r (modulo size)
        ranks = [direction * (position - offset) % size for position in range(size)]
        parents = [_parent(position, size) for position in range(size)]
        found.append([(ranks[above], ranks[place]) for place, above in enumerate(parents) if above is not None])
    return found


def _places(rank: int, size: int) -> tuple[_Place, ...]:
    return tuple(
        _Place(
            next((parent for parent, child in tree if child == rank), None),
            tuple(child for parent, child in tree if parent == rank),
        )
        for tree in edges(size)
    )


def _parent(position: int, size: int) -> int | None:
    """The parent in the in-order binary tree, where odd positions are leaves, the lowest set bit is the level, and 0 is
    the root."""
    if position == 0:
        return None
    bit = position & -position
    below = position ^ bit
    return above if (above := below | 2 * bit) < size else below


def _receive(collective: Collective, piece: Tensor, source: int) -> tuple[Tensor, Work]:
    part = torch.empty_like(piece)
    return part, collective.recv(part, source=source)
