"""Federated averaging: clients that come and go, with data of their own, and workers that play them in turn."""

from paceline.strategies.federated.strategy import Federated

__all__ = ["Federated"]
