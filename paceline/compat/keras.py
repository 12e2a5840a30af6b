"""Keras' `fit` on several workers: each trains on its own data, and their models meet now and then.

Needs Keras 3, on the backend torch, jax or tensorflow.
"""

from typing import Any, final

import keras

from paceline.errors import UsageError
from paceline.training.worker import Worker


@final
class Averaging(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Local SGD (Stich, "Local SGD converges fast and communicates little", ICLR 2019): all workers begin with the
    first one's weights, and have the mean of all after every `every` batches and at the end. Optimizers keep their own
    states; whole numbers among the weights stay each worker's own.

    Give `fit` each worker's own part of the data, as many batches on each, and this callback as the last:
    `model.fit(x[worker.rank::worker.size], ..., callbacks=[..., Averaging(worker, every=8)])`. When one worker stops
    early, all stop after that epoch. With `steps_per_execution` models meet when Keras next tells of a batch's end.

    Raises:
        UsageError: `every` is not positive; when training begins: workers have different numbers of batches or epochs,
            or data of which nobody knows how many batches they are; later: a worker has ended alone.
    """

    def __init__(self, worker: Worker, *, every: int = 1) -> None:
        super().__init__()
        if every < 1:
            raise UsageError(f"every counts batches and is at least 1, not {every}")
        self._worker, self._every = worker, every
        self._num_before = self._num_done = self._met_at = 0  # batches: before this epoch, so far, at the last meeting

    def on_train_begin(self, logs: Any = None) -> None:
        everyone = self._worker.all_gather_object([self.params.get("steps"), self.params.get("epochs")])
        if any(steps is None for steps, _ in everyone) or any(theirs != everyone[0] for theirs in everyone):
            each = ", ".join(f"{steps} batches in each of {epochs} epochs" for steps, epochs in everyone)
            raise UsageError(
                f"workers have, by rank, {each}, and would wait for each other: give fit as many samples on each "
                "worker, or steps_per_epoch, and as many epochs"
            )
        self._num_before = self._num_done = self._met_at = 0
        self._set(self._worker.broadcast_tree(self._weights()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._num_done = self._num_before + batch + 1
        if self._num_done // self._every > self._met_at // self._every:
            self._average(f"batch {self._num_done}")
            self._met_at = self._num_done

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._num_before = self._num_done
        self.model.stop_training = any(self._worker.all_gather_object(bool(self.model.stop_training)))

    def on_train_end(self, logs: Any = None) -> None:
        self._average("the end")

    def _average(self, when: str) -> None:
        """Trees that differ are refused on all workers, so that nobody's end is averaged with another's batch."""
        self._set(self._worker.all_reduce_tree({when: self._weights()})[when])

    def _weights(self) -> list[Any]:
        """The weights that are real numbers."""
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()  # while `fit` trains, variables are out of date; it reads them again after this
        return [variable.numpy() for variable in self._averaged()]

    def _set(self, weights: list[Any]) -> None:
        for variable, weight in zip(self._averaged(), weights, strict=True):
            variable.assign(weight)

    def _averaged(self) -> list[Any]:
        return [v for v in self.model.weights if keras.backend.is_float_dtype(v.dtype)]
