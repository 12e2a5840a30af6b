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

    Give `fit` each worker's own part of the data, as many batches on each:
    `model.fit(x[worker.rank::worker.size], ..., callbacks=[Averaging(worker, every=8)])`.

    Raises:
        UsageError: `every` is not positive; when training begins: workers have different numbers of batches, or data
            of which nobody knows how many batches they are.
    """

    def __init__(self, worker: Worker, *, every: int = 1) -> None:
        super().__init__()
        if every < 1:
            raise UsageError(f"every counts batches and is at least 1, not {every}")
        self._worker, self._every = worker, every
        self._num_batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        everyone = self._worker.all_gather_object(self.params.get("steps"))
        if None in everyone or len({*everyone}) > 1:
            raise UsageError(
                f"workers have {', '.join(map(str, everyone))} batches an epoch, by rank, and would wait for each "
                "other: give fit as many samples on each worker, or steps_per_epoch"
            )
        self._num_batches = 0
        self._set(self._worker.broadcast_tree(self._weights()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._num_batches += 1
        if self._num_batches % self._every == 0:
            self._average()

    def on_train_end(self, logs: Any = None) -> None:
        if self._num_batches % self._every:
            self._average()

    def _average(self) -> None:
        self._set(self._worker.all_reduce_tree(self._weights()))

    def _weights(self) -> list[Any]:
        """Of real numbers."""
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()  # while `fit` trains, variables are out of date; it reads them again after this
        return [variable.numpy() for variable in self._averaged()]

    def _set(self, weights: list[Any]) -> None:
        for variable, weight in zip(self._averaged(), weights, strict=True):
            variable.assign(weight)

    def _averaged(self) -> list[Any]:
        return [v for v in self.model.weights if keras.backend.is_float_dtype(v.dtype)]
