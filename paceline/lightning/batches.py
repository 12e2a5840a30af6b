"""The training loader as Lightning loops over it."""

from collections.abc import Callable, Iterator
from typing import Any, final

from paceline.training.sharding import Place, ShardedLoader, StandIn


@final
class TrainingBatches(StandIn):
    """A prepared loader whose every pass begins where Lightning's counters are, also after a resume.

    Args:
        on_end: called when a pass is over.
    """

    def __init__(self, loader: ShardedLoader, trainer: Any, *, on_end: Callable[[], None]) -> None:
        self._loader, self._trainer, self._on_end = loader, trainer, on_end

    def __iter__(self) -> Iterator[Any]:
        loop = self._trainer.fit_loop
        self._loader.begin_at(
            Place(loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready)
        )
        yield from self._loader
        self._on_end()

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Tells Lightning that passes go on where they were; its own counters say where."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""
