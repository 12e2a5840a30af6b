"""Finds this process's host, the address at which others reach it, and the network interface with that address."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from paceline.errors import UsageError

_ELSEWHERE = "192.0.2.1"  # nobody has this address (RFC 5737), so packets to it would leave this host
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


def host_identity() -> str:
    """The same for exactly those processes that can share memory: machine and namespaces."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    namespaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
    return " ".join(map(str, (socket.gethostname(), boot, *namespaces)))


def own_ip_address() -> str:
    """The address at which ranks on other hosts reach this one.

    It belongs to the interface that GLOO_SOCKET_IFNAME names; else packets to MASTER_ADDR, or to other networks, leave
    from it. Raises UsageError if there is no such interface, or it has no IPv4 address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return _address_of(interface)
    for destination in (os.environ.get("MASTER_ADDR"), _ELSEWHERE):
        address = _source_of_packets_to(destination) if destination else None
        if address is not None and not address.startswith("127."):
            return address
    return "127.0.0.1"


def interface_with(address: str) -> str:
    """Name of the network interface that has the IP address. Raises UsageError, which lists all, if none has."""
    addresses = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if address not in addresses:
        raise UsageError(f"no network interface of this host has address {address}; there are {sorted(addresses)}")
    return str(addresses[address])


def is_of_this_host(address: str) -> bool:
    """Whether one of its network interfaces has the IP address."""
    return any(entry.address == address for entries in psutil.net_if_addrs().values() for entry in entries)


@contextmanager
def nccl_interface(address: str) -> Iterator[None]:
    """Have NCCL use the interface of the address, unless the environment names one.

    NCCL reads that from the environment, once in a process, when it first communicates. Raises as `interface_with`.
    """
    if _NCCL_INTERFACE in os.environ:
        yield
        return
    os.environ[_NCCL_INTERFACE] = "=" + interface_with(address)
    try:
        yield
    finally:
        del os.environ[_NCCL_INTERFACE]


def _address_of(interface: str) -> str:
    for entry in psutil.net_if_addrs().get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    known = ", ".join(sorted(psutil.net_if_addrs()))
    raise UsageError(f"GLOO_SOCKET_IFNAME names {interface}, which has no IPv4 address here; there are {known}")


def _source_of_packets_to(host: str) -> str | None:
    """The local address from which packets to `host` would leave; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
