"""Samples divided among ranks, and divided anew when ranks come or go."""

import random
from collections.abc import Iterator, Sized
from typing import Any, final

from torch.utils.data import Sampler

from paceline.horovod import runtime as basics


@final
class ElasticSampler(Sampler[int]):
    """Every rank's part of a data set, in Horovod's order.

    `random.Random(seed + epoch)` shuffles; what was processed is left out from the front; the rest begins anew where it
    cannot be divided evenly, and goes round the ranks.

    Tell it of batches by `record_batch`, and call `set_epoch` at an epoch's end.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, none of which is processed."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Each rank has processed a batch."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide among the ranks that there are now what is not processed."""
        self.num_replicas, self.rank = basics.runtime().size, basics.runtime().rank
        indices = [*range(len(self.dataset))]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = self.remaining_indices
        more = self.total_size - len(indices)
        # Where fewer are left than ranks lack, the few come more than once: each rank is to have as many batches.
        padding = (indices * (-(-more // len(indices))))[:more] if more else []
        self.indices = [*indices, *padding][self.rank : self.total_size : self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
