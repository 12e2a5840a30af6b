"""Directories of any file system that fsspec knows."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final
from urllib.parse import urlsplit

from paceline.errors import UsageError

_PIECE_BYTES = 2**22


def is_address(text: str | Path) -> bool:
    """Whether it names a place of fsspec's, and no path."""
    return "://" in str(text)


@final
@dataclass(frozen=True)
class Place:
    """A directory of any file system that fsspec knows."""

    address: str
    files: Any
    root: str

    @classmethod
    def at(cls, address: str) -> "Place":
        """Raises UsageError if there is no such file system, what it needs is not installed, or the address has a
        password, which manifests and messages would show."""
        if any(urlsplit(part).password is not None or "password=" in part for part in address.split("::")):
            raise UsageError("leave the password out of the address, which is shown; fsspec's settings may have it")
        import fsspec  # here, because most runs do without

        try:
            files, root = fsspec.core.url_to_fs(address)
        except Exception as error:  # each file system has errors of its own
            raise UsageError(f"cannot reach {address}: {error}") from None
        return cls(address.rstrip("/"), files, root.rstrip("/"))

    def names(self) -> list[str]:
        """Of the files that are there; none where there is no directory."""
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
        with self._said("read"):
            return cast(bytes, self.files.cat_file(f"{self.root}/{name}"))

    def make(self) -> None:
        with self._said("write to"):
            self.files.makedirs(self.root, exist_ok=True)

    def write(self, name: str, content: bytes) -> None:
        with self._said("write to"):
            self.files.pipe_file(f"{self.root}/{name}", content)

    def put(self, source: Path, name: str) -> None:
        """A copy that is cut off is noticed when it is read, by its digest."""
        with source.open("rb") as file, self.files.open(f"{self.root}/{name}", "wb") as target:
            shutil.copyfileobj(file, target, _PIECE_BYTES)

    def remove(self, name: str) -> None:
        with self._said("write to"), contextlib.suppress(FileNotFoundError):
            self.files.rm_file(f"{self.root}/{name}")

    @contextlib.contextmanager
    def _said(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each file system has errors of its own
            raise UsageError(f"cannot {what} {self.address}: {type(error).__name__}: {error}") from None
