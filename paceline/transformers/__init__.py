"""Transformers' Trainer under Paceline's strategies: `from paceline.transformers import Trainer, TrainingArguments` is
the changed line. Nothing else in Paceline imports this.
"""

from paceline.transformers.arguments import TrainingArguments
from paceline.transformers.trainer import Trainer

__all__ = ["Trainer", "TrainingArguments"]
