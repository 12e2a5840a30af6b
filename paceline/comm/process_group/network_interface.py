"""Which of this host's network interfaces the backends of torch.distributed use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from paceline.errors import UsageError

_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


def interface_with(address: str) -> str:
    """Name of the network interface that has the IP address.

    Raises:
        UsageError: none has it; the message lists those there are.
    """
    addresses = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if address not in addresses:
        raise UsageError(f"no network interface of this host has address {address}; there are {sorted(addresses)}")
    return str(addresses[address])


@contextmanager
def nccl_interface(address: str) -> Iterator[None]:
    """Have NCCL use the interface of the address, unless the environment names one.

    NCCL reads that from the environment, once in a process, when it first communicates.

    Raises:
        UsageError: as `interface_with`.
    """
    if _NCCL_INTERFACE in os.environ:
        yield
        return
    os.environ[_NCCL_INTERFACE] = "=" + interface_with(address)
    try:
        yield
    finally:
        del os.environ[_NCCL_INTERFACE]
