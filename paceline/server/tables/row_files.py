"""A table's rows on the disk: each server's in files of its own, some rows a file, so that nobody holds them all.

They are weights-only torch files; whoever names them says their digests. A later time may write those rows alone that
have changed since: the files before get second names in its directory, so that each directory has all rows.
"""

import errno
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pickle import PickleError
from typing import NamedTuple

import torch
from torch import Tensor

from paceline import durable
from paceline.errors import UsageError
from paceline.row_file import DIRECTORY, RowFile
from paceline.server.tables.dividing import part_of


class DamagedRows(UsageError):
    """A file of rows is gone, or is not what was written."""


class Writer(NamedTuple):
    """Who writes files: of the table of this number, one server of so many."""

    table: int
    server: int
    num_servers: int

    def may_have_written(self, file: RowFile) -> bool:
        return file.num_servers == self.num_servers and file.name.startswith(self.start)

    @property
    def start(self) -> str:
        """The names of its files begin so."""
        return f"table-{self.table}-server-{self.server}-"


def write(
    pieces: Iterable[Mapping[str, Tensor]], directory: Path, writer: Writer, *, before: Sequence[RowFile] = ()
) -> list[RowFile]:
    """Write rows of a table, a file a piece; returns these files and those before. Raises OSError.

    Args:
        before: files there whose rows these follow.
    """
    later = max((file.later + 1 for file in before), default=0)
    start = writer.start + (f"later-{later}-" if later else "")
    files = list(before)
    for count, piece in enumerate(pieces):
        buffer = io.BytesIO()
        torch.save({name: value.clone() for name, value in piece.items()}, buffer)  # of a view torch saves the whole
        content = buffer.getvalue()
        path = directory / f"{start}{count}.pt"
        with durable.whole(path) as partial:
            partial.write_bytes(content)
        files.append(RowFile(path.name, writer.server, writer.num_servers, hashlib.sha256(content).hexdigest()))
    durable.sync(directory.parent)
    return files


def make_directory(directory: Path) -> None:
    """Raises OSError, and ValueError for a directory with another name than checkpoints give."""
    if not DIRECTORY.fullmatch(directory.name):
        raise ValueError(f"rows are not written to {directory}")
    if not directory.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "its host has no such directory")
    directory.mkdir(exist_ok=True)


def name_again(files: Sequence[RowFile], before: Path, directory: Path) -> Sequence[RowFile]:
    """Give these files second names in another directory; returns none of them where one is gone, or the file system
    gives no second names."""
    made = []
    try:
        for file in files:
            os.link(before / file.name, directory / file.name)
            made.append(directory / file.name)
    except OSError:
        for path in made:
            path.unlink()
        return ()
    return files


def read(
    directory: Path, files: Iterable[RowFile], *, server: int, num_servers: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """What these files have of the rows of one server among so many. Other servers, and other numbers of them, may have
    written them. With them comes how late they were written (`RowFile.later`), from the latest on.

    Raises:
        UsageError: a file cannot be read; the message names it.
        DamagedRows: it is not what was written.
    """
    for file in sorted(files, key=lambda file: -file.later):
        if not _may_share(file, server=server, num_servers=num_servers):
            continue
        try:
            state = torch.load(io.BytesIO(_content(directory, file)), weights_only=True)
            own = part_of(state, server=server, num_servers=num_servers)
        except (PickleError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, EOFError) as error:
            raise DamagedRows(f"{directory / file.name} has no rows: {error}") from None
        yield file.later, own


def require_whole(directory: Path, files: Sequence[RowFile]) -> None:
    """Raises DamagedRows, which names the file, if one is not what was written, UsageError if it cannot be read."""
    for file in files:
        _content(directory, file)


def _content(directory: Path, file: RowFile) -> bytes:
    path = directory / file.name
    try:
        if not path.is_file():
            raise DamagedRows(f"cannot read rows from {path}: there is no such file")
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read rows from {path}: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise DamagedRows(f"{path} is damaged: its bytes are not those that its checksum is of")
    return content


def _may_share(file: RowFile, *, server: int, num_servers: int) -> bool:
    """Whether the ranges of hashed keys overlap: of the server that wrote the file, and of this one."""
    return file.server * num_servers < (server + 1) * file.num_servers and (
        server * file.num_servers < (file.server + 1) * num_servers
    )
