"""Gossip: every worker mixes its model with some others', and nobody with all."""

from paceline.strategies.gossip.asynchronous import AsynchronousGossip
from paceline.strategies.gossip.strategy import Gossip

__all__ = ["AsynchronousGossip", "Gossip"]
