"""Notices a collation that leaves samples out of some batches."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from paceline.errors import UsageError
from paceline.training.sharding.part import Place


@final
class FullBatches:
    """Compares the rows of each batch with its samples: gradients count by the samples that collation was given. One
    that makes a row of several samples gives as many for as many, and no batch in full."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._gives_all: bool | None = None  # whether collation gives as many rows as there are samples
        self._lengths: dict[int, int] = {}  # how many rows it gives of so many samples

    def require(self, tensors: Sequence[Tensor], num_samples: int, place: Place) -> None:
        """Raises UsageError where a batch, of these tensors, lacks samples that another one does not lack."""
        if tensors and tensors[0].dim() and tensors[0].shape[0] == num_samples and self._gives_all is not False:
            self._gives_all = True  # 4 us, where what follows takes 18
            return
        lengths = {len(tensor) for tensor in tensors if tensor.dim()}
        if len(lengths) != 1 or not 1 < (length := lengths.pop()) <= num_samples:
            return
        if any(num_samples in tensor.shape[1:] for tensor in tensors):
            return  # samples lie along another dimension
        is_all, before = length == num_samples, self._lengths.setdefault(num_samples, length)
        if length != before or self._gives_all is (not is_all):
            raise UsageError(
                f"rank {self._rank}, epoch {place.epoch}: of {num_samples} samples the DataLoader's collation gives "
                f"{length} in batch {place.num_batches_done + 1}, and another share in a batch before, but workers' "
                "gradients would count as if it gave all; leave samples out of the data set or its sampler "
                "(torch.utils.data.Subset), so that every batch is full"
            )
        self._gives_all = is_all
