"""Memory for what a table holds, which grows: the process's own, or files whose pages come and go."""

import errno
import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from paceline.errors import UsageError

_LEAST_FILE_BYTES = 1 << 20
_REMEDIES = {
    errno.EMFILE: "allow each process more open files (ulimit -n): a table in memory has up to four, and one for each "
    "of its optimizer's states; one in files has two for its keys, its rows and each of its optimizer's states, and up "
    "to four for its index",
    errno.ENOMEM: "allow each process more address space (ulimit -v) or mappings (sysctl vm.max_map_count)",
}


Address = tuple[int, ...]
"""Where other processes of this host find a column; empty: nowhere."""


class Column(ABC):
    """Entries of one width, in the order of their slots."""

    values: Tensor
    """Shape (entries, width); another tensor after `reserve`."""
    address: Address = ()

    @abstractmethod
    def reserve(self, num: int) -> None:
        """Have so many entries at least; new ones are 0. Raises UsageError if there is no room."""


class Storage(ABC):
    """Where a server's tables, or one process's, have their columns."""

    piece_bytes: ClassVar[int]
    """Bytes of the rows that are looked at between two calls of `trim`, at most."""
    lends: bool = False
    """Whether other processes of this host may change columns, too."""

    def plain_view(self) -> dict[str, Any]:
        """How other processes of this host see columns, as plain data; empty: they do not."""
        return {}

    def alone(self) -> AbstractContextManager[None]:
        """Meanwhile no other process of this host changes columns."""
        return nullcontext()

    def changing(self) -> AbstractContextManager[None]:
        """Entered while entries that are known change."""
        return nullcontext()

    @abstractmethod
    def column(self, num: int, width: int, dtype: torch.dtype, *, is_seen: bool = False) -> Column:
        """A new one, of so many entries at least, which are 0. Raises UsageError if there is no room.

        Args:
            is_seen: by other processes of this host, if they see any.
        """

    @abstractmethod
    def trim(self) -> None:
        """Give back pages, if more are resident than may be."""


@final
class _Own(Column):
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def reserve(self, num: int) -> None:
        if num > len(self.values):
            wider = self.values.new_zeros(max(num, 2 * len(self.values)), self.values.shape[1])
            wider[: len(self.values)] = self.values
            self.values = wider


class InMemory(Storage):
    piece_bytes = 1 << 62

    def column(self, num: int, width: int, dtype: torch.dtype, *, is_seen: bool = False) -> Column:
        return _Own(torch.zeros(num, width, dtype=dtype))

    def trim(self) -> None:
        pass


@dataclass(frozen=True)
class TableFiles:
    """What a server is told of files for its tables."""

    directory: str
    """The directory on the server's host."""
    resident_bytes: int


@final
class InFiles(Storage):
    """Columns are mapped files without a name, which are gone when the process is.

    Entries are read and written in the page cache, which the kernel writes to the disk and takes back under pressure.
    What this process has mapped is given back (madvise(2), MADV_DONTNEED) once it is more than `resident_bytes`.

    Raises:
        UsageError: there can be no file.
    """

    # With each page that is read the kernel maps up to 15 more. So 512 rows of 256 bytes may make 32 MiB resident.
    piece_bytes = 1 << 17

    def __init__(self, files: TableFiles) -> None:
        self._directory, self._resident_bytes = Path(files.directory), files.resident_bytes
        self._columns: weakref.WeakSet[_Mapped] = weakref.WeakSet()
        self._others_bytes = _mapped_bytes()  # of libraries and shared memory
        self.column(1, 1, torch.uint8)

    def column(self, num: int, width: int, dtype: torch.dtype, *, is_seen: bool = False) -> Column:
        made = _Mapped(self._directory, num, width, dtype)
        self._columns.add(made)
        return made

    def trim(self) -> None:
        if _mapped_bytes() - self._others_bytes > self._resident_bytes:
            for column in self._columns:
                column.give_back()
            self._others_bytes = _mapped_bytes()


@final
class _Mapped(Column):
    def __init__(self, directory: Path, num: int, width: int, dtype: torch.dtype) -> None:
        self._directory, self._width, self._dtype = directory, width, dtype
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise self._refused(error, "a file") from None
        weakref.finalize(self, os.close, self._file)
        self._map(num)

    def reserve(self, num: int) -> None:
        if num > len(self.values):
            self._map(num + num // 4)

    def give_back(self) -> None:
        self._map_of_values.madvise(mmap.MADV_DONTNEED)

    def _map(self, num: int) -> None:
        """The disk's room is taken now: a write into a page that finds none would kill the process."""
        num_bytes = max(_LEAST_FILE_BYTES, num * self._width * self._dtype.itemsize)
        try:
            os.posix_fallocate(self._file, 0, num_bytes)
            self._map_of_values = mmap.mmap(self._file, num_bytes)
        except OSError as error:
            raise self._refused(error, f"{num_bytes} bytes") from None
        num = num_bytes // (self._width * self._dtype.itemsize)
        flat = torch.frombuffer(self._map_of_values, dtype=self._dtype, count=num * self._width)
        self.values = flat.view(num, self._width)

    def _refused(self, error: OSError, what: str) -> UsageError:
        remedy = "make some, or give another directory with --option table_dir=DIR"
        return no_room(error, f"{what} of a table in {self._directory}", remedy=remedy)


def no_room(error: OSError, what: str, *, remedy: str) -> UsageError:
    """
    Args:
        remedy: where the error says nothing of another one.
    """
    return UsageError(f"no room for {what}: {error.strerror}; {_REMEDIES.get(error.errno or 0, remedy)}")


def _mapped_bytes() -> int:
    """Resident pages of files and shared memory, the tables' among them (proc(5), statm)."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE
