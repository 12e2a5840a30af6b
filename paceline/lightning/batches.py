"""The training loader as Lightning loops over it."""

from collections.abc import Callable, Iterator
from typing import Any, final

from paceline.errors import UsageError
from paceline.training.sharding import Place, RoundBatches, ShardedLoader, StandIn


@final
class TrainingBatches(StandIn):
    """A prepared loader whose every pass begins where Lightning's counters are, also after a resume.

    Args:
        on_end: called when a pass is over.
    """

    def __init__(self, loader: ShardedLoader, trainer: Any, *, on_end: Callable[[], None]) -> None:
        self._loader, self._trainer, self._on_end = loader, trainer, on_end

    def become(self, prepared: "TrainingBatches") -> None:
        """Give that one's batches from now on."""
        self._loader = prepared._loader

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


_WHOLE = {
    "fast_dev_run": False,  # first: it sets others of these
    "limit_train_batches": 1.0,
    "overfit_batches": 0.0,
    "val_check_interval": 1.0,
    "max_steps": -1,
}
"""What the Trainer must say for whole rounds."""


@final
class Rounds(StandIn):
    """Tells Lightning, where an epoch begins, how many batches this worker has in its round.

    Args:
        on_end: called where a pass ends with the run.

    Raises:
        UsageError: the Trainer is to end, or to validate, in the middle of an epoch.
    """

    def __init__(self, loader: RoundBatches, trainer: Any, *, on_end: Callable[[], None]) -> None:
        for name, value in _WHOLE.items():
            if getattr(trainer, name) != value:
                raise UsageError(
                    f"Trainer({name}=...) does not go with clients, whose round is an epoch: leave "
                    "it out, and give max_epochs, or `paceline run --max-steps`, a number of rounds"
                )
        self._loader, self._trainer, self._on_end = loader, trainer, on_end
        self.sampler = self  # Lightning tells a loader's sampler that an epoch begins

    def set_epoch(self, epoch: int) -> None:
        self._loader.require_turns_for_all()  # else it would end training where there are no batches
        loop = self._trainer.fit_loop
        loop.max_batches = self._trainer.val_check_batch = loop._combined_loader.limits = len(self)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader
        self._on_end()

    def __len__(self) -> int:
        return len(self._loader)
