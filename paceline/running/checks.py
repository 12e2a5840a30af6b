"""What can be refused before anything starts."""

from paceline.config import Target
from paceline.engines.scripting import Program, Script
from paceline.errors import unknown
from paceline.training.evaluation import metrics_in


def check_metric(program: Program, target: Target | None) -> None:
    """Raise UsageError for a target that the script's text shows it never returns."""
    known = metrics_in(program.source) if isinstance(program, Script) and target is not None else None
    if target is not None and known is not None and target.metric not in known:
        raise unknown("target metric", target.metric, known)
