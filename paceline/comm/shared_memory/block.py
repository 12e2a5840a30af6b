"""A piece of memory without a name that processes of one host share."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from paceline.comm.shared_memory.descriptors import open_descriptor
from paceline.comm.shared_memory.mapping import address_range, map_into
from paceline.errors import PeerLost, TensorMismatch


@dataclass(frozen=True)
class BlockAddress:
    """Where another process of the same host finds a block. Plain numbers, so that it travels anywhere."""

    pid: int
    """The process that made the block."""
    fd: int
    """The descriptor that it has there."""
    num_bytes: int
    nonce: int
    """A part of the block's name, so that nothing else is taken for it."""

    @property
    def name(self) -> str:
        return f"paceline-{self.nonce:016x}"

    def gathered(self, gather: Callable[[Tensor], list[Tensor]]) -> "list[BlockAddress]":
        """Every rank's address, in rank order; `gather` gathers a 1-D tensor from all. Collective call."""
        rows = gather(torch.tensor([self.pid, self.fd, self.num_bytes, self.nonce]))
        return [BlockAddress(*row.tolist()) for row in rows]


@final
class SharedBlock:
    """Shared memory that exists for as long as some process maps it.

    memfd_create(2) makes it: it has no name under /dev/shm, so a killed process leaves nothing behind, and the size of
    /dev/shm is no limit. Processes of the same user open the creator's descriptor through /proc.
    """

    def __init__(self, fd: int, address: BlockAddress, *, keep_descriptor: bool) -> None:
        self.address = address
        self._fd: int | None = fd if keep_descriptor else None
        # Nobody closes the map, which would pull the memory from under living tensors: the last tensor to go does.
        memory = address_range(address.num_bytes)
        map_into(memory, fd, address.num_bytes, is_written=True)
        self.buffer = memoryview(memory)
        """The memory as bytes, `address.num_bytes` of them."""
        self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        """The memory as a uint8 tensor of shape (address.num_bytes,); it and its views outlive the block."""

    @classmethod
    def create(cls, num_bytes: int) -> "SharedBlock":
        """A new zeroed block. Pages take up memory from when they are first touched.

        Raises:
            ValueError: `num_bytes` is not positive.
            OSError: there is no descriptor or no address space left.
        """
        if num_bytes <= 0:
            raise ValueError(f"a block needs at least one byte, not {num_bytes}")
        address = BlockAddress(os.getpid(), -1, num_bytes, secrets.randbits(63))
        fd = os.memfd_create(address.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return cls(fd, replace(address, fd=fd), keep_descriptor=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, address: BlockAddress) -> "SharedBlock":
        """Another process's block. Raises PeerLost as `open_block`."""
        with open_block(address) as fd:
            return cls(fd, address, keep_descriptor=False)

    def close_descriptor(self) -> None:
        """Let nobody else open the block; call it once all peers have. A second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Let go of the memory, which is unmapped when the last tensor on it goes. A second call does nothing."""
        self.close_descriptor()
        self.buffer = memoryview(b"")
        self.tensor = torch.empty(0, dtype=torch.uint8)


@contextlib.contextmanager
def open_block(address: BlockAddress) -> Iterator[int]:
    """A descriptor of another process's block, which is mapped meanwhile. Raises PeerLost as `open_descriptor`, or if
    the block has another size, could shrink while it is mapped, or cannot be mapped."""
    fd = open_descriptor(address.pid, address.fd, link=f"/memfd:{address.name} (deleted)", flags=os.O_RDWR)
    try:
        if os.fstat(fd).st_size != address.num_bytes:
            raise PeerLost(f"shared memory of process {address.pid} has not the size that was announced")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise PeerLost(f"shared memory of process {address.pid} is not sealed: it could shrink under its readers")
        yield fd
    except (OSError, ValueError) as error:
        raise PeerLost(f"cannot map {address.num_bytes} bytes of process {address.pid}: {error}") from None
    finally:
        os.close(fd)


def exchange_blocks(
    mine: SharedBlock, gather: Callable[[Tensor], list[Tensor]], meet: Callable[[], None]
) -> list[SharedBlock]:
    """Every rank's block, in rank order, given this rank's. Collective call.

    Args:
        gather: returns the 1-D tensors that all ranks call it with, in rank order.
        meet: returns once all ranks have called it.

    Raises:
        TensorMismatch: ranks made blocks of different sizes.
        PeerLost: as `SharedBlock.open`.
    """
    try:
        addresses = mine.address.gathered(gather)
        for rank, theirs in enumerate(addresses):
            if theirs.num_bytes != addresses[0].num_bytes:
                raise TensorMismatch(
                    f"ranks allocate different sizes: rank 0 {addresses[0].num_bytes} bytes, "
                    f"rank {rank} {theirs.num_bytes} bytes"
                )
        blocks = [mine if theirs == mine.address else SharedBlock.open(theirs) for theirs in addresses]
        meet()
    finally:
        mine.close_descriptor()
    return blocks
