"""Where a data set's files lie on this machine, and how they get there."""

import os
import shutil
import sys
import tarfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from paceline.data.dataset import DatasetError

VARIABLE = "PACELINE_DATA"


@dataclass(frozen=True)
class Download:
    url: str
    md5: str
    """As the data set's authors publish it; guards against damage, not against an attacker."""


@dataclass(frozen=True)
class FileSet:
    folder: str
    """Name of the folder that customarily holds them."""
    names: tuple[str, ...]
    """Each may also lie there gzip'd, with `.gz` added."""
    downloads: tuple[Download, ...] = ()


def locate(files: FileSet, directory: str | os.PathLike[str] | None, *, reserved: Collection[str] = ()) -> list[Path]:
    """The path of every file, in the order of `files.names`, downloaded where needed and allowed.

    Args:
        directory: the only place to look; None stands for $PACELINE_DATA, then the user's cache, then the network.
        reserved: folder names of all data sets. A folder named after another one is never taken for this one's, since
            MNIST and Fashion-MNIST have the same file names.

    Raises:
        DatasetError: naming the folder and what is missing, or the URL and why it could not be had.
    """
    given = directory if directory is not None else os.environ.get(VARIABLE) or None
    if given is not None:
        parent = Path(given).expanduser()
        for folder in (parent / files.folder, parent):
            if folder.name != files.folder and folder.name in reserved:
                continue
            found = _present(files, folder)
            if missing := [name for name in files.names if name not in found]:
                if found:
                    raise DatasetError(f"{folder} lacks {', '.join(missing)}, raw or with .gz")
                continue
            return [found[name] for name in files.names]
    if directory is not None:
        raise DatasetError(f"none of {', '.join(files.names)} is in {parent} or in its subfolder {files.folder}")
    return _from_cache(files, looked_in=given)


def _present(files: FileSet, folder: Path) -> dict[str, Path]:
    """The files that are there, by name; the raw one where there are both."""
    candidates = [(name, folder / f"{name}{suffix}") for suffix in (".gz", "") for name in files.names]
    return {name: path for name, path in candidates if path.is_file()}


def _from_cache(files: FileSet, *, looked_in: str | os.PathLike[str] | None) -> list[Path]:
    # Imported here: pooch and filelock take 0.1 s, which a run on local files need not pay.
    import pooch  # type: ignore[import-untyped]
    from filelock import FileLock

    folder = Path(pooch.os_cache("paceline")) / files.folder
    found = _present(files, folder)
    if len(found) < len(files.names):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):  # the workers of one host download once
                _download_missing(files, folder)
        except (OSError, ValueError, EOFError, zlib.error, tarfile.TarError) as error:
            urls = ", ".join(download.url for download in files.downloads)
            place = f"{VARIABLE}={looked_in}" if looked_in else f"{VARIABLE} (which is not set)"
            raise DatasetError(
                f"{files.folder} is neither in {place} nor in {folder}, and downloading {urls} failed: {error}. "
                f"Put the files in a folder and name it, or its parent, in {VARIABLE}"
            ) from error
        found = _present(files, folder)
    if missing := [name for name in files.names if name not in found]:
        raise DatasetError(f"{', '.join(missing)}: not in what was downloaded into {folder}")
    return [found[name] for name in files.names]


def _download_missing(files: FileSet, folder: Path) -> None:
    """Download what is not there with the right checksum; ValueError where what comes has a wrong one."""
    import pooch

    if len(_present(files, folder)) == len(files.names):
        return  # another worker was faster
    for download in files.downloads:
        name = PurePosixPath(download.url).name
        fetcher = pooch.HTTPDownloader(progressbar=_Progress(name))
        path = Path(pooch.retrieve(download.url, f"md5:{download.md5}", name, folder, downloader=fetcher))
        if name.endswith(".tar.gz"):
            _unpack(path, files.names, folder)
            path.unlink()


def _unpack(archive: Path, names: Collection[str], folder: Path) -> None:
    """Write the named files of a tar archive into `folder`, and nothing else.

    Paths in the archive are never used, only base names that are asked for, so none can lead out of `folder`.
    """
    with tarfile.open(archive) as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            content = tar.extractfile(member) if member.isfile() and name in names else None
            if content is None:
                continue
            partial = folder / f"{name}.part"
            with content, partial.open("wb") as file:
                shutil.copyfileobj(content, file)
            partial.replace(folder / name)


class _Progress:
    """The progress bar that pooch drives, drawn by rich; silent where no terminal looks."""

    total: int
    """Bytes; pooch sets it before the first update."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        from paceline.running.watching import is_terminal

        columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not is_terminal(sys.stderr))
        self._task = self._bar.add_task(name)

    def update(self, num_bytes: int) -> None:
        self._bar.start()
        self._bar.update(self._task, total=self.total, advance=num_bytes)

    def reset(self) -> None:
        self._bar.reset(self._task)

    def close(self) -> None:
        self._bar.stop()
