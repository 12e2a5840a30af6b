"""What hostile workers do to what they send, or to the data that they train on; for studies of defences."""

from paceline.attacks.base import Attack, DataAttack, SentAttack, parse, require_possible
from paceline.attacks.poisoned_data import Backdoor, CleanLabel, LabelFlip
from paceline.attacks.sent import (
    Alie,
    Gauss,
    InnerProduct,
    MinMax,
    MinSum,
    ModelReplacement,
    SignFlip,
)

__all__ = [
    "Alie",
    "Attack",
    "Backdoor",
    "CleanLabel",
    "DataAttack",
    "Gauss",
    "InnerProduct",
    "LabelFlip",
    "MinMax",
    "MinSum",
    "ModelReplacement",
    "SentAttack",
    "SignFlip",
    "parse",
    "require_possible",
]
