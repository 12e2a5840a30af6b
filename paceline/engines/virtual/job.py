"""What a virtual run needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster.description import Cluster
from paceline.config import RunConfig
from paceline.engines.scripting import Program
from paceline.strategies.base import Strategy


@dataclass(frozen=True)
class VirtualJob:
    """One run on a virtual cluster."""

    program: Program
    strategy: Strategy
    num_workers: int
    cluster: Cluster
    config: RunConfig
    checkpoint: bytes | None = None
    num_processes: int = 1
    """That the workers' computing is spread over, at most."""

    @property
    def num_crews(self) -> int:
        """Processes besides the simulation's; none where that computes as well."""
        num_processes = min(self.num_processes, self.num_workers)
        return num_processes if num_processes > 1 else 0
