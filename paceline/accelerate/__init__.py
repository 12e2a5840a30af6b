"""Accelerate's scripts under Paceline's strategies: `from paceline.accelerate import Accelerator` is the changed line.
Nothing else in Paceline imports this.
"""

from paceline.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
