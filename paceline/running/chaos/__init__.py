"""Runs whose workers and servers are struck where chance has it, and whether nothing is lost in them."""

from paceline.running.chaos.campaign import Campaign, Struck
from paceline.running.chaos.schedule import Schedule

__all__ = ["Campaign", "Schedule", "Struck"]
