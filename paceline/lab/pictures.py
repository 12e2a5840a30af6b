"""Rows of images as one picture."""

import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_ZOOM, _GAP = 4, 4
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def gallery(rows: Sequence[Tensor]) -> bytes:
    """A PNG with a row of images for each tensor, of shape (n, C, H, W) with pixels between 0 and 1; C is 1 or 3."""
    lines = [torch.cat([_framed(image) for image in row], dim=2) for row in rows]
    width = max(line.shape[2] for line in lines)
    return _png(torch.cat([torch.nn.functional.pad(line, (0, width - line.shape[2]), value=1.0) for line in lines], 1))


def _framed(image: Tensor) -> Tensor:
    large = image.detach().clamp(0, 1).repeat_interleave(_ZOOM, 1).repeat_interleave(_ZOOM, 2).expand(3, -1, -1)
    return torch.nn.functional.pad(large, (0, _GAP, 0, _GAP), value=1.0)


def _png(picture: Tensor) -> bytes:
    """A picture of shape (3, H, W) as PNG, by the format's specification, second edition, sections 5 and 11."""
    _, height, width = picture.shape
    pixels = (picture * 255).round().to(torch.uint8).permute(1, 2, 0).reshape(height, 3 * width)
    raw = b"".join(b"\0" + bytes(row.tolist()) for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
