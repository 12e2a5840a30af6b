"""What the Ray engine is asked to run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.config import RunConfig
from paceline.engines.scripting import Program
from paceline.engines.standing import LauncherLost
from paceline.strategies.base import Strategy


@dataclass(frozen=True)
class Job:
    """What a run needs to know."""

    program: Program
    strategy: Strategy
    num_workers: int
    config: RunConfig
    checkpoint: bytes | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launcher has and a cluster's processes may not."""
    num_at_start: int | None = None
    """For an elastic run that is resumed: how many workers it began with."""
    launcher_lost: LauncherLost | None = None
    """What the run goes on after."""
    is_spread: bool = False
    """Hosts get the same number of workers each, whatever they are."""
