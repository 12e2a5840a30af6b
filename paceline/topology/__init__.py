"""With whom a worker exchanges at a step."""

from paceline.topology.base import Neighbours, Topology
from paceline.topology.base_k import BaseK
from paceline.topology.changing import Matcha, OnePeerExponential, RandomPairs
from paceline.topology.fixed import Chain, Everybody, Exponential, Hypercube, Ring, Star, Torus, Tree
from paceline.topology.graph import EdgeList, Graph

__all__ = [
    "BaseK",
    "Chain",
    "EdgeList",
    "Everybody",
    "Exponential",
    "Graph",
    "Hypercube",
    "Matcha",
    "Neighbours",
    "OnePeerExponential",
    "RandomPairs",
    "Ring",
    "Star",
    "Topology",
    "Torus",
    "Tree",
]
