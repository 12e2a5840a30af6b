"""The training loader as Accelerate's scripts loop over it."""

from collections.abc import Iterator, Sequence
from typing import Any, final

from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from paceline.errors import UsageError
from paceline.training.sharding import Place, RoundBatches, ShardedLoader, StandIn

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def training_data(loaders: Sequence[DataLoader[Any]]) -> DataLoader[Any]:
    """The first, unless that goes through its data in order, as for an evaluation, and another one shuffles."""
    first, *others = loaders
    if not isinstance(_sampler_of(first), SequentialSampler):
        return first
    return next((loader for loader in others if isinstance(_sampler_of(loader), _SHUFFLING)), first)


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


@final
class TrainingLoader(StandIn, DataLoaderStateMixin):  # type: ignore[misc]
    """A prepared loader that tells Accelerate which batch is an epoch's last."""

    def __init__(self, loader: ShardedLoader | RoundBatches, device: Any) -> None:
        self._loader, self._device = loader, device
        self.gradient_state = GradientState()
        self._has_begun = False

    def require_its_batch(self) -> None:
        """Raises UsageError where the script loops over another loader alone, which is for evaluation."""
        active = [loader for loader in self.gradient_state.dataloader_references if loader is not None]
        if not self._has_begun or (active and self not in active):
            raise UsageError(
                "accelerator.backward: this batch is of a DataLoader that prepare took for one to evaluate on. Give "
                "prepare the training DataLoader together with model and optimizer, and all others in a call of their "
                "own: model, optimizer, training = accelerator.prepare(model, optimizer, training); "
                "testing = accelerator.prepare(testing)"
            )

    def begin_at(self, num_batches: int) -> "TrainingLoader":
        """The next pass leaves out this many batches of its epoch."""
        self._loader.begin_at(Place(self._loader.place.epoch, num_batches))
        return self

    def __iter__(self) -> Iterator[Any]:
        length = self._length()
        self._has_begun = True
        self.begin()
        try:
            for batch in self._loader:
                self.end_of_dataloader = self._loader.place.num_batches_done == length
                yield batch if self._device is None else send_to_device(batch, self._device)
        finally:
            self.end()

    def _length(self) -> int | None:
        try:
            return len(self._loader)
        except TypeError:
            if self.gradient_state.num_steps == 1:
                return None
            raise UsageError(
                "gradient_accumulation_steps needs to know an epoch's last batch: give the data set a length"
            ) from None

    def __len__(self) -> int:
        return len(self._loader)
