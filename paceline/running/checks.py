"""What can be refused before anything starts."""

from paceline.config import Best, Target
from paceline.engines.scripting import Program, Script
from paceline.errors import unknown
from paceline.training.evaluation import metrics_in


def check_metric(program: Program, wanted: Target | Best | None, *, what: str = "target metric") -> None:
    """Raise UsageError for a metric that the script's text shows it never returns."""
    known = metrics_in(program.source) if isinstance(program, Script) and wanted is not None else None
    if wanted is not None and known is not None and wanted.metric not in known:
        raise unknown(what, wanted.metric, known)
