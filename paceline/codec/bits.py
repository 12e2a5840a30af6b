"""Codes of 1, 2 or 4 bits, packed into bytes."""

import functools

import torch
from torch import Tensor

_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # as many bytes as a byte holds codes


def num_bytes(num_codes: int, bits: int) -> int:
    return -(-num_codes * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """
    Args:
        codes: uint8 of shape (n,), each below 2**bits.
        bits: of a code: 1, 2, 4 or 8.

    Returns:
        uint8 of shape (ceil(n * bits / 8),), the first code in the lowest bits.
    """
    if bits == 8:
        return codes
    per_byte = 8 // bits
    missing = -codes.numel() % per_byte
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    # As one word, the product with a sum of powers of two moves each of its bytes to its place in the top byte.
    width = 8 * per_byte
    factor = sum(1 << (width - 8 - (8 - bits) * place) for place in range(per_byte))
    return ((codes.view(_WORDS[bits]) * factor) >> (width - 8)).bitwise_and_(0xFF).to(torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes, uint8."""
    if bits == 8:
        return packed
    per_byte = 8 // bits
    shifts = _shifts(bits, packed.device)
    codes = (packed[:, None] >> shifts).bitwise_and_((1 << bits) - 1)
    return codes.view(-1)[:count] if per_byte * packed.numel() >= count else packed.new_empty(0)


@functools.lru_cache
def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
