"""Directories of any file system that fsspec knows."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final
from urllib.parse import urlsplit

from paceline.errors import UsageError
from paceline.running.patience import Pulse

_PIECE_BYTES = 2**22


def is_address(text: str | Path) -> bool:
    """Whether it names a place of fsspec's, and no path."""
    return "://" in str(text)


@final
@dataclass(frozen=True)
class Place:
    """A directory of any file system that fsspec knows. Each answer of it, and each piece of a file, is a beat of its
    pulse."""

    address: str
    files: Any
    root: str
    pulse: Pulse = field(default_factory=Pulse, compare=False)

    @classmethod
    def at(cls, address: str, pulse: Pulse | None = None) -> "Place":
        """Raises UsageError if there is no such file system, what it needs is not installed, or the address has a
        password, which manifests and messages would show."""
        if any(urlsplit(part).password is not None or "password=" in part for part in address.split("::")):
            raise UsageError("leave the password out of the address, which is shown; fsspec's settings may have it")
        import fsspec  # here, because most runs do without

        try:
            files, root = fsspec.core.url_to_fs(address)
        except Exception as error:  # each file system has errors of its own
            raise UsageError(f"cannot reach {address}: {error}") from None
        return cls(address.rstrip("/"), files, root.rstrip("/"), pulse or Pulse())

    def names(self) -> list[str]:
        """The names of the files that are there; none where there is no directory."""
        with self._said("read"):
            self.files.invalidate_cache()
            there = self.files.exists(self.root)
            return [Path(path).name for path in self.files.ls(self.root, detail=False)] if there else []

    def has(self, name: str) -> bool:
        with self._said("read"):
            self.files.invalidate_cache()
            return bool(self.files.exists(f"{self.root}/{name}"))

    def size_of(self, name: str) -> int | None:
        """In bytes; none where there is no such file."""
        return cast(int, self.files.size(f"{self.root}/{name}")) if self.has(name) else None

    def read(self, name: str) -> bytes:
        with self._said("read"), self.files.open(f"{self.root}/{name}", "rb") as file:
            return b"".join(self._pieces(file))

    def make(self) -> None:
        with self._said("write to"):
            self.files.makedirs(self.root, exist_ok=True)

    def write(self, name: str, content: bytes) -> None:
        with self._said("write to"):
            self.files.pipe_file(f"{self.root}/{name}", content)

    def put(self, source: Path, name: str) -> None:
        """A copy that is cut off is noticed when it is read, by its digest. Raises OSError where it is not there, as
        long as it is here, when it has been written."""
        with source.open("rb") as file, self.files.open(f"{self.root}/{name}", "wb") as target:
            for piece in self._pieces(file):
                target.write(piece)
        expected, there = source.stat().st_size, self.size_of(name)
        if there != expected:
            found = "it is not there" if there is None else f"{there} bytes of it are there"
            raise OSError(f"{expected} bytes of {name} were written, and {found}")

    def remove(self, name: str) -> None:
        with self._said("write to"), contextlib.suppress(FileNotFoundError):
            self.files.rm_file(f"{self.root}/{name}")

    def _pieces(self, file: Any) -> Iterator[bytes]:
        while piece := file.read(_PIECE_BYTES):
            self.pulse.beat()
            yield piece
        self.pulse.beat()

    @contextlib.contextmanager
    def _said(self, what: str) -> Iterator[None]:
        self.pulse.beat()
        try:
            yield
            self.pulse.beat()
        except Exception as error:  # each file system has errors of its own
            raise UsageError(f"cannot {what} {self.address}: {type(error).__name__}: {error}") from None
