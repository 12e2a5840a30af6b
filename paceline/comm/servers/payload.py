"""The tensors of messages on a line: in a block of shared memory of their own, which grows with them."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import final

from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.errors import PeerLost
from paceline.messages import Raw, raw_bytes

# Five 64-bit words of a line say where one side's tensors are: their bytes, then the block's address.
_BYTES, _ADDRESS, _STOP = 0, 1, 5


@final
class SentPayload:
    """The writing end, which makes the block.

    Args:
        numbers: the line's words for it.
    """

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers
        self._block: SharedBlock | None = None

    def write(self, frames: Sequence[Raw]) -> None:
        """Write these in the place of what was written before."""
        raws = [raw_bytes(frame) for frame in frames]
        num_bytes = sum(map(len, raws))
        self._numbers[_BYTES] = num_bytes
        if not num_bytes:
            return
        if self._block is None or self._block.address.num_bytes < num_bytes:
            self._renew(2 * num_bytes)
        assert self._block is not None
        start = 0
        for raw in raws:
            self._block.buffer[start : start + len(raw)] = raw
            start += len(raw)

    def close(self) -> None:
        self._numbers.release()
        if self._block is not None:
            self._block.close()

    def _renew(self, num_bytes: int) -> None:
        before, self._block = self._block, SharedBlock.create(num_bytes)
        if before is not None:
            before.close()
        for place, number in enumerate(astuple(self._block.address), _ADDRESS):
            self._numbers[place] = number


@final
class ReceivedPayload:
    """The reading end.

    Args:
        numbers: the line's words for it.
    """

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers
        self._block: SharedBlock | None = None

    def read(self) -> list[Raw]:
        """The bytes that the other end wrote last, as one frame over its memory; no frame if it wrote none.

        Raises:
            PeerLost: the block is not there, cannot be mapped, or is smaller than what is to be in it.
        """
        num_bytes = self._numbers[_BYTES]
        if not num_bytes:
            return []
        address = BlockAddress(*self._numbers[_ADDRESS:_STOP])
        if not 0 < num_bytes <= address.num_bytes:
            raise PeerLost(f"process {address.pid} announced {num_bytes} bytes in a block of {address.num_bytes}")
        if self._block is None or self._block.address != address:
            self._close_block()
            self._block = SharedBlock.open(address)
        return [self._block.buffer[:num_bytes]]

    def close(self) -> None:
        self._numbers.release()
        self._close_block()

    def _close_block(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None
