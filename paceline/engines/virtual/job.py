"""What a virtual run needs to know."""

from dataclasses import dataclass

from paceline.cluster.description import Cluster
from paceline.config import RunConfig
from paceline.engines.scripting import Program
from paceline.strategies.base import Strategy


@dataclass(frozen=True)
class VirtualJob:
    program: Program
    strategy: Strategy
    num_workers: int
    cluster: Cluster
    config: RunConfig
    checkpoint: bytes | None = None
    num_at_start: int | None = None
    """Workers that the run began with, where an elastic one was resumed with others."""
