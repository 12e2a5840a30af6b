"""A piece of memory without a name that processes of one host share."""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.errors import PeerLost, TensorMismatch


@dataclass(frozen=True)
class BlockAddress:
    """Where another process of the same host finds a block. Plain numbers, so that it travels anywhere."""

    pid: int
    """The process that made the block."""
    fd: int
    """The descriptor that it has there."""
    num_bytes: int

    def gathered(self, gather: Callable[[Tensor], list[Tensor]]) -> "list[BlockAddress]":
        """Every rank's address, in rank order; `gather` gathers a 1-D tensor from all. Collective call."""
        rows = gather(torch.tensor([self.pid, self.fd, self.num_bytes]))
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
        memory = mmap.mmap(fd, address.num_bytes)
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
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            return cls(fd, BlockAddress(os.getpid(), fd, num_bytes), keep_descriptor=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, address: BlockAddress) -> "SharedBlock":
        """The block that another process made and announced.

        Raises:
            PeerLost: that process is gone, closed its descriptor, or runs on another host or in another PID namespace.
        """
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerLost(
                f"cannot open shared memory of process {address.pid}: {error.strerror}; "
                "the process must be alive, on this host, in the same PID namespace and of the same user"
            ) from None
        try:
            if os.fstat(fd).st_size != address.num_bytes:
                raise PeerLost(f"{path} is no longer the shared memory that process {address.pid} announced")
            return cls(fd, address, keep_descriptor=False)
        finally:
            os.close(fd)

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
