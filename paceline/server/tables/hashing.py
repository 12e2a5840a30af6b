"""Keys mixed into 64 bits: which server owns a row, and what its first values are, follow from them."""

from typing import Any

import torch
from torch import Tensor

# Through NumPy's methods, which take a few thousand keys in half the time of torch's operations.

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(keys: Tensor) -> Tensor:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: the output of SplitMix64
    for these states, as int64. No two keys have the same."""
    bits = _unsigned(keys) + _GOLDEN
    bits ^= bits >> 30
    bits *= _FIRST
    bits ^= bits >> 27
    bits *= _SECOND
    bits ^= bits >> 31
    return torch.from_numpy(bits.view("i8"))


def shifted(bits: Tensor, by: int) -> Tensor:
    """Shift to the right, with zeros from the left, where torch repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def owners(keys: Tensor, num_servers: int) -> Tensor:
    """The server of each key: the hashed keys, as numbers without sign, are cut into ranges of the same length."""
    return owners_of(mixed(keys), num_servers)


def owners_of(hashed: Tensor, num_servers: int) -> Tensor:
    """The same of keys that were mixed."""
    owner = _unsigned(hashed) >> 32
    owner *= num_servers
    owner >>= 32
    return torch.from_numpy(owner.view("i8"))


def each_owns(hashed: Tensor, num_servers: int) -> list[Tensor]:
    """For each server, where among these mixed keys its own are."""
    if num_servers == 1:
        return [torch.arange(len(hashed))]
    owner = owners_of(hashed, num_servers).numpy()
    return [torch.from_numpy((owner == server).nonzero()[0]) for server in range(num_servers)]


def words(keys: Tensor, *, seed: int, num: int) -> Tensor:
    """`num` random numbers of 64 bits for each key, shape (keys, num)."""
    return mixed(mixed(mixed(keys) + seed).unsqueeze(1) + torch.arange(num) * _signed(_GOLDEN))


def normal(keys: Tensor, *, seed: int, num: int) -> Tensor:
    """`num` draws from the standard normal distribution for each key, float64 of shape (keys, num), by Box and Muller.

    They depend on the seed and the key alone.
    """
    first = words(keys, seed=seed, num=num)
    radius = (-2 * _uniform(first).log()).sqrt()
    return radius * (2 * torch.pi * _uniform(mixed(first))).cos()


def _uniform(bits: Tensor) -> Tensor:
    """Numbers between 0 and 1, and neither of them."""
    return (shifted(bits, 11).double() + 0.5) * 2.0**-53


def _unsigned(numbers: Tensor) -> Any:
    return numbers.numpy().view("u8")


def _signed(number: int) -> int:
    return number - (1 << 64)
