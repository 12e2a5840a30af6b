"""Reference models of the field's papers, by name."""

from paceline.models.registry import NAMES, build

__all__ = ["NAMES", "build"]
