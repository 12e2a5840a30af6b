"""Planning: what a script would cost on a cluster, before anything is bought or run."""

from __future__ import annotations

from paceline.planner.predict import Prediction, predict
from paceline.planner.search import Plan, plan
from paceline.planner.work import Work

__all__ = ["Plan", "Prediction", "Work", "plan", "predict"]
