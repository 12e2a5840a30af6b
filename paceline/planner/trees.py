"""All-reduce along two trees: when pieces arrive at the roots, and down again, level by level."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np

from paceline.comm.algorithms.pieces import PIECE_BYTES
from paceline.comm.algorithms.tree import edges
from paceline.engines.virtual.network.links import CHUNK_BYTES
from paceline.planner.fabric import Fabric, Floats, Numbers


@final
@dataclass(frozen=True)
class Level:
    """Parents and children, as ranks, at one distance from the root, and the links between them."""

    parents: Numbers
    children: Numbers
    num_siblings: Numbers
    """How many children each child's parent has, itself included: 1 or 2."""
    num_later: Numbers
    """Siblings that are sent to after it."""
    up_s: Floats
    """Seconds a byte for each child alone."""
    down_s: Floats
    latency_s: Floats


@final
@dataclass(frozen=True)
class Trees:
    """Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
    Computing 35(12), 2009, section 3: half of the tensor goes along either tree in pieces, first up, then down. Among
    n = 2**h >= 4 alike hosts, with pieces of p bytes: 2 (M / B + (2 h - 3) p / B + h L), and M / (8 B) more for many
    pieces from 8 hosts on."""

    levels: tuple[tuple[Level, ...], ...]
    """The levels of each tree, from the root down."""
    size: int

    @property
    def edges(self) -> tuple[Numbers, Numbers]:
        levels = [level for tree in self.levels for level in tree]
        return np.concatenate([each.parents for each in levels]), np.concatenate([each.children for each in levels])

    @classmethod
    def of(cls, hosts: Numbers, fabric: Fabric) -> "Trees":
        """`hosts` are those of the ranks."""
        return cls(tuple(_levels(tree, hosts, fabric) for tree in edges(len(hosts))), len(hosts))

    def time_s(self, num_bytes: float, *, one_way_s: float, message_s: float, further_s: float) -> float:
        """If all ranks begin at once. `one_way_s`: the busiest link's time for what goes up in both trees."""
        half_bytes = num_bytes / 2
        piece_bytes = min(PIECE_BYTES, half_bytes)
        down_s = partial(_down_s, further_s=further_s)
        ways_s = [
            max(way_s(tree, half_bytes, piece_bytes, size=self.size, message_s=message_s) for tree in self.levels)
            for way_s in (_up_s, down_s)
        ]
        several = 1 - piece_bytes / half_bytes  # of the pieces, those that come behind another
        return sum(ways_s) + several * _uneven_s(self.size, one_way_s, one_way_s * piece_bytes / num_bytes)


def _uneven_s(size: int, one_way_s: float, piece_s: float) -> float:
    """What many pieces take longer since links serve what comes first, not every sender as much.

    One tree's root is a leaf of the other and sends there at twice the rate of the rank that shares its link, for 3 / 4
    of M / B. That rank's sums wait, and two levels above 1 / 8 of M / B is left when the others are done. Among
    2**h + 1 ranks the pieces of both trees meet at rank 0's card, the top of both; among 3, all pass it.
    """
    if size == 3:
        return 1.5 * one_way_s
    found_s = one_way_s / 8 if size >= 8 or size % 2 else 0.0
    return found_s + (2 * piece_s if (size - 1).bit_count() == 1 and size > 3 else 0.0)


def _up_s(levels: Sequence[Level], num_bytes: float, piece_bytes: float, *, size: int, message_s: float) -> float:
    """When the root has the sum of so many bytes of every rank.

    A rank passes a piece on when it has it from all children. Once the first pieces fill the way to the root, the
    slower of two decides: a link that passes all pieces, or the last piece's way.
    """
    first_s, last_s = np.zeros(size), np.zeros(size)
    last_bytes = num_bytes % piece_bytes or piece_bytes
    for level in reversed(levels):
        all_s = _joined_s(level, first_s, num_bytes)
        end_s = np.maximum(all_s, _joined_s(level, last_s, last_bytes))
        first_s[level.parents] = _joined_s(level, first_s, piece_bytes) + message_s
        last_s[level.parents] = end_s + message_s
    return float(last_s.max())


def _joined_s(level: Level, ready_s: Floats, num_bytes: float) -> Floats:
    """When each child's parent has so many bytes of all its children, which send once they are ready."""
    begin_s, alone_s = ready_s[level.children] + level.latency_s, level.up_s * num_bytes
    earliest_s, latest_s = np.full_like(ready_s, np.inf), np.zeros_like(ready_s)
    np.minimum.at(earliest_s, level.parents, begin_s + level.num_siblings * alone_s)
    np.maximum.at(latest_s, level.parents, begin_s + alone_s)
    joined_s: Floats = np.maximum(earliest_s, latest_s)[level.parents]
    return joined_s


def _down_s(
    levels: Sequence[Level], num_bytes: float, piece_bytes: float, *, size: int, message_s: float, further_s: float
) -> float:
    """When every rank has so many bytes that the root had."""
    first_s, last_s = np.zeros(size), np.zeros(size)
    last_bytes = num_bytes % piece_bytes or piece_bytes
    for level in levels:
        begin_s, end_s = first_s[level.parents], last_s[level.parents]
        all_s = begin_s + _sent_s(level, num_bytes, message_s, further_s)
        first_s[level.children] = begin_s + _sent_s(level, piece_bytes, message_s, further_s)
        last_s[level.children] = np.maximum(all_s, end_s + _sent_s(level, last_bytes, message_s, further_s))
    return float(last_s.max())


def _sent_s(level: Level, num_bytes: float, message_s: float, further_s: float) -> Floats:
    """How long sending so many bytes to each child takes: a link serves siblings in turns, chunk by chunk."""
    alone_s = level.down_s * num_bytes
    last_s = level.down_s * (num_bytes % CHUNK_BYTES or CHUNK_BYTES)
    together_s = alone_s + (level.num_siblings - 1) * np.maximum(alone_s, further_s)
    sent_s: Floats = together_s - level.num_later * np.maximum(last_s, further_s) + message_s + level.latency_s
    return sent_s


def _levels(tree: Sequence[tuple[int, int]], hosts: Numbers, fabric: Fabric) -> tuple[Level, ...]:
    """From a tree's edges; siblings stand in the order in which they are sent to."""
    parents, children = np.array(tree, dtype=np.int64).T
    order = np.argsort(parents, kind="stable")
    parents, children = parents[order], children[order]
    num_siblings = np.bincount(parents)[parents]
    is_second = np.append(False, parents[1:] == parents[:-1])
    columns = (
        parents,
        children,
        num_siblings,
        np.where(is_second, 0, num_siblings - 1),
        1 / (fabric.shares_per_s(hosts[children], hosts[parents]) * num_siblings),
        1 / (fabric.shares_per_s(hosts[parents], hosts[children]) * num_siblings),
        fabric.latency_s(hosts[parents], hosts[children]),
    )
    depths = _depths(parents, children, len(hosts))
    return tuple(Level(*(column[depths == depth] for column in columns)) for depth in range(1, depths.max() + 1))


def _depths(parents: Numbers, children: Numbers, size: int) -> Numbers:
    """How many edges each child is from the root."""
    above = np.full(size, -1)
    above[children] = parents
    depths, ancestors = np.zeros(size, dtype=np.int64), above
    while (is_below := ancestors >= 0).any():
        depths += is_below
        ancestors = np.where(is_below, above[ancestors], -1)
    return depths[children]
