"""A command on another host in this process's environment, where a launcher passes none: a program that takes FILE and
COMMAND. It needs nothing but Python's own library, since it runs before the environment tells where the rest is."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# These are this host's or this task's, not the job's.
_OWN = ("HOSTNAME", "TMPDIR", "PBS_TASKNUM", "PBS_NODENUM", "PBS_VNODENUM", "LSF_PM_TASKID")

_PREFIX, _SUFFIX = ".paceline-job-", ".json"
_LEFT_S = 3600.0
"""Hosts come within a minute, or not at all: a file that is so much older was left by a launcher that was killed."""


@contextmanager
def shared_environment() -> Iterator[Path]:
    """A file of the working directory that has the environment and the directory, for its user alone (mode 0600);
    removed at the end, with those that are left of others. Raises OSError where nothing can be written there."""
    variables = {name: value for name, value in os.environ.items() if name not in _OWN}
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=Path.cwd())
    for other in Path.cwd().glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            if os.fstat(descriptor).st_mtime - other.stat().st_mtime > _LEFT_S:
                other.unlink()
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump([os.getcwd(), variables], file)
        yield Path(name)
    finally:
        os.unlink(name)


def main() -> None:
    """Becomes COMMAND in FILE's environment and directory."""
    file, *command = sys.argv[1:]
    with open(file, encoding="ascii") as opened:
        directory, variables = json.load(opened)
    os.chdir(directory)
    os.execve(command[0], command, {**os.environ, **variables})


if __name__ == "__main__":
    main()
