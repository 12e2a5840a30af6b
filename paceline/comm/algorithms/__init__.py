"""Algorithms over send and receive, each written once: all-reduces, to be compared and simulated, and a broadcast."""

from collections.abc import Mapping

from paceline.comm.algorithms.all_to_all import all_to_all
from paceline.comm.algorithms.halving_doubling import halving_doubling
from paceline.comm.algorithms.naive_ring import naive_ring
from paceline.comm.algorithms.reduce_broadcast import reduce_broadcast
from paceline.comm.algorithms.ring import ring
from paceline.comm.algorithms.tree import tree
from paceline.comm.algorithms.work import AlgorithmWork, AllReduceAlgorithm

__all__ = ["ALGORITHMS", "AlgorithmWork", "AllReduceAlgorithm"]

ALGORITHMS: Mapping[str, AllReduceAlgorithm] = {
    "ring": ring,
    "tree": tree,
    "halving-doubling": halving_doubling,
    "reduce-broadcast": reduce_broadcast,
    "all-to-all": all_to_all,
    "naive-ring": naive_ring,
}
"""By the names of the command line."""
