"""The official file layouts: idx, as MNIST has it, and CIFAR-10's binary version; both raw or gzip'd."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.dataset import DatasetError

IDX_UNSIGNED_BYTE = 0x08
CIFAR10_SHAPE = (3, 32, 32)
CIFAR10_ROW_BYTES = 1 + math.prod(CIFAR10_SHAPE)


def read_idx(path: Path, *, num_dimensions: int) -> Tensor:
    """An idx file of bytes, as uint8 of `num_dimensions` dimensions; a raw file is mapped, not read.

    Layout: two zero bytes, the type (8 is a byte), the number of dimensions, each dimension as a big-endian 32-bit
    integer, then the values, last dimension fastest (LeCun et al., the MNIST database's page, "File formats"). Raises
    DatasetError, which names the file, if its magic number or its length is another.
    """
    content = _read_bytes(path)
    header_bytes = 4 + 4 * num_dimensions
    if len(content) < header_bytes:
        raise DatasetError(f"{path} is cut short: {len(content)} bytes, and its idx header alone takes {header_bytes}")
    magic = int.from_bytes(content[:4].tobytes(), "big")
    expected_magic = IDX_UNSIGNED_BYTE << 8 | num_dimensions
    if magic != expected_magic:
        raise DatasetError(
            f"{path} starts with the magic number {magic:#010x}; expected {expected_magic:#010x}, "
            f"an idx file of bytes in {num_dimensions} dimension(s)"
        )
    shape = [int(length) for length in content[4:header_bytes].view(">u4")]
    expected_bytes = header_bytes + math.prod(shape)
    if len(content) != expected_bytes:
        raise DatasetError(f"{path} holds {len(content)} bytes; expected {expected_bytes} for its shape {shape}")
    return torch.from_numpy(content[header_bytes:].reshape(shape))


def read_cifar10(paths: list[Path]) -> tuple[Tensor, Tensor]:
    """Files of CIFAR-10's binary version, one after another: images uint8 [N, 3, 32, 32] and labels int64 [N].

    Layout: rows of one label byte and 3,072 bytes of red, green and blue planes, each by rows (Krizhevsky, the CIFAR-10
    page, "Binary version"). Raises DatasetError, which names the file, if one is no whole number of rows.
    """
    rows = [_read_cifar10_rows(path) for path in paths]
    images = torch.empty(sum(map(len, rows)), *CIFAR10_SHAPE, dtype=torch.uint8)
    labels = torch.empty(len(images), dtype=torch.int64)
    start = 0
    for part in rows:
        stop = start + len(part)
        images[start:stop] = part[:, 1:].view(-1, *CIFAR10_SHAPE)
        labels[start:stop] = part[:, 0]
        start = stop
    return images, labels


def _read_cifar10_rows(path: Path) -> Tensor:
    content = _read_bytes(path)
    if len(content) == 0 or len(content) % CIFAR10_ROW_BYTES:
        raise DatasetError(
            f"{path} holds {len(content)} bytes; expected a whole number of CIFAR-10 rows of {CIFAR10_ROW_BYTES}, "
            "a label and 3 x 32 x 32 pixels each"
        )
    return torch.from_numpy(content.reshape(-1, CIFAR10_ROW_BYTES))


def _read_bytes(path: Path) -> NDArray[np.uint8]:
    """The file's content. A raw file is mapped copy-on-write, so processes on one host share its pages."""
    try:
        if path.suffix == ".gz":
            return np.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=np.uint8)
        if path.stat().st_size == 0:  # which cannot be mapped
            return np.empty(0, dtype=np.uint8)
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="c"))
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
