"""Transformers' Trainer under Paceline's strategies: `trainer.add_callback(PacelineCallback(trainer))` is the line that
a script gets. Nothing else in Paceline imports this.
"""

from paceline.transformers.callback import PacelineCallback

__all__ = ["PacelineCallback"]
