"""What clients keep from turn to turn, in a file: one that does not train takes no memory."""

import io
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, final

import torch
from torch import Tensor


@final
class Kept:
    """Named tensors of each client. The file has no name, so that a killed process leaves nothing behind; it lies where
    TMPDIR says, and is there once a client keeps anything."""

    def __init__(self) -> None:
        self._opened: IO[bytes] | None = None
        self._places: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __getitem__(self, client: int) -> dict[str, Tensor]:
        """What the client has kept; nothing if it was never here."""
        if client not in self._places:
            return {}
        start, length = self._places[client]
        self._file.seek(start)
        kept: dict[str, Tensor] = torch.load(io.BytesIO(self._file.read(length)), weights_only=True)
        return kept

    def put(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep these in the place of what was kept before, if that is as long, and otherwise behind all else."""
        written = io.BytesIO()
        # Clones, since a view would be saved with all of the memory that it lies in.
        torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()}, written)
        raw = written.getvalue()
        start, length = self._places.get(client, (0, -1))
        if length != len(raw):
            start = self._file.seek(0, 2)
        self._file.seek(start)
        self._file.write(raw)
        self._places[client] = (start, len(raw))

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    @property
    def _file(self) -> IO[bytes]:
        if self._opened is None:
            self._opened = tempfile.TemporaryFile(prefix="paceline-clients-")  # noqa: SIM115 - as long as the run
        return self._opened
