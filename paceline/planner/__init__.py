"""Planning: what a script would cost on a cluster, before anything is bought or run."""

from paceline.planner.demand import StepWork
from paceline.planner.predict import Prediction, predict
from paceline.planner.search import Plan, plan

__all__ = ["Plan", "Prediction", "StepWork", "plan", "predict"]
