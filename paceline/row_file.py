"""Files of a table's rows, as a checkpoint names them: servers have written them in a directory beside it."""

import re
from typing import Any, NamedTuple

DIRECTORY = re.compile(r"rows-[0-9]+-[0-9a-f]{8}")
"""What such a directory is called; all others are the user's."""
_NAME = re.compile(r"table-[0-9]+-server-[0-9]+-(?:later-([0-9]+)-)?[0-9]+\.pt")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class RowFile(NamedTuple):
    """Some rows of a table, with all that `Table.state` gives of them."""

    name: str
    server: int
    num_servers: int
    """How many servers there were when it was written, of which this was one: which keys it may have follows."""
    sha256: str

    @property
    def later(self) -> int:
        """Files with a higher number have newer rows of the same keys; those with 0 are of all keys."""
        found = _NAME.fullmatch(self.name)
        return int(found[1]) if found is not None and found[1] is not None else 0

    @classmethod
    def of_plain(cls, plain: Any) -> "RowFile":
        """Raises ValueError if these are no fields of a file's."""
        try:
            name, server, num_servers, sha256 = plain
            is_one = type(server) is int and type(num_servers) is int and 0 <= server < num_servers
            if is_one and _NAME.fullmatch(name) and _DIGEST.fullmatch(sha256):
                return cls(name, server, num_servers, sha256)
        except (TypeError, ValueError):
            pass
        raise ValueError(f"{plain!r} names no file of rows")


def files_of_plain(plain: Any) -> dict[str, list[RowFile]]:
    """Each table's, by its name. Raises ValueError if this is none, or leaves out the files of a server."""
    if not isinstance(plain, dict) or not all(isinstance(files, list) for files in plain.values()):
        raise ValueError("its files of rows are not given by table")
    tables = {table: [RowFile.of_plain(file) for file in files] for table, files in plain.items()}
    for table, files in tables.items():
        nums = {file.num_servers for file in files}
        if nums != {len({file.server for file in files})}:
            raise ValueError(f"the files of table {table!r} are not those of all servers")
    return tables


def directory_of_plain(plain: Any, *, is_needed: bool) -> str:
    """Where the files are. Raises ValueError if it is called otherwise than such a directory."""
    if isinstance(plain, str) and (DIRECTORY.fullmatch(plain) or (not plain and not is_needed)):
        return plain
    raise ValueError(f"rows do not lie in {plain!r}")
