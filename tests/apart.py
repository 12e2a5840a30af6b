"""Environments of their own, for what would be in the way of other tests: their packages lie before those of this one.

    python tests/apart.py tensorflow

installs what `tests/environments/tensorflow.txt` lists into `.venv/apart/tensorflow`, as `make test-slow` does. Where
no index has it, there is none, and the tests that need it are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

LISTS = Path(__file__).parent / "environments"
STAMP = ".complete"


def folder_of(name: str) -> Path:
    return Path(sys.prefix, "apart", name)


def python_of(name: str) -> str | None:
    """The interpreter that sees both; None where this environment has not been made."""
    folder = folder_of(name)
    return str(folder / "bin" / "python") if (folder / STAMP).exists() else None


def make(name: str) -> None:
    folder = folder_of(name)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    behind = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    (own / "behind.pth").write_text(f"import site; site.addsitedir({str(behind)!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    # The list is whole, so that pip need not look for more.
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    done = subprocess.run([*pip, "install", *options, "-r", str(LISTS / f"{name}.txt")], check=False)
    if done.returncode == 0:
        (folder / STAMP).touch()
    else:
        print(f"{folder} is not there, so that tests which need it are skipped", file=sys.stderr)


if __name__ == "__main__":
    make(sys.argv[1])
