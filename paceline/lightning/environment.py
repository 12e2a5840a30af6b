"""Where a worker of a run is, in Lightning's words."""

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from paceline.errors import UsageError
from paceline.training.worker import Worker

_Base: Any = object


class EnvironmentBody(_Base):  # type: ignore[misc]
    """A run's workers as Lightning's cluster: `paceline run`, or torchrun, has started them."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        with worker.meeting("a new Trainer"):
            firsts = [rank for rank, local in enumerate(worker.all_gather_object(worker.local_rank)) if local == 0]
        self.num_nodes = len(firsts)
        """Hosts. Ranks of one follow each other."""
        self._node_rank = sum(first <= worker.rank for first in firsts) - 1
        rank_zero_only.rank = worker.rank

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise UsageError("Paceline's workers find one another by themselves: there is no main address or port")

    main_port = main_address

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._worker.size

    def set_world_size(self, size: int) -> None:
        """The run has said it."""

    def global_rank(self) -> int:
        return self._worker.rank

    def set_global_rank(self, rank: int) -> None:
        """The run has said it."""

    def local_rank(self) -> int:
        return self._worker.local_rank

    def node_rank(self) -> int:
        return self._node_rank
