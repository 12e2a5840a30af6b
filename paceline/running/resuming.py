"""Which checkpoint a run goes on from."""

from dataclasses import dataclass
from pathlib import Path

from paceline import checkpoint_files
from paceline.checkpoint import FILE_NAME, Checkpoint, DamagedCheckpoint
from paceline.elastic import Elastic
from paceline.errors import UsageError
from paceline.records import truncate
from paceline.server.tables.row_files import DamagedRows, require_whole
from paceline.training.pauses import MODEL_FILE
from paceline.training.row_tables import ROWS_FILE

NEWEST, BEST = "newest", "best"


@dataclass(frozen=True)
class Found:
    """A checkpoint, and where it lies."""

    where: str
    """The path in a result directory, or the address."""
    raw: bytes
    checkpoint: Checkpoint
    warnings: tuple[str, ...] = ()
    """What is wrong with newer checkpoints, which are damaged."""

    @property
    def path(self) -> Path:
        """Where the checkpoint is, if that is a result directory."""
        return Path(self.where)


def find(directory: Path, which: str | int = NEWEST) -> Found:
    """The checkpoint to go on from.

    Args:
        which: `newest`, `best`, or an iteration. Where the newest is damaged, it is the one before.

    Raises:
        UsageError: there is none, or the one that is asked for is damaged.
    """
    if which == NEWEST:
        return _newest_whole(directory)
    path = _of_iteration(directory, which)
    return _read(path, at=None if which == BEST else as_iteration(which))


def require_fitting(found: Found, *, num_workers: int, seed: int, elastic: Elastic | None) -> None:
    """Raises UsageError if this run cannot go on from there."""
    where, checkpoint = found.where, found.checkpoint
    if elastic is None and "dealing" in checkpoint.data:
        raise UsageError(f"{where} was saved by an elastic run; resume it with --elastic MIN:MAX, with any workers")
    if elastic is None and len(checkpoint.workers) != num_workers:
        raise UsageError(f"{where} was saved with --workers {len(checkpoint.workers)}; resume with as many")
    if checkpoint.seed != seed:
        raise UsageError(f"{where} was saved with --seed {checkpoint.seed}; resume with the same")


def drop_later(found: Found) -> None:
    """The run goes on from there in its directory: drop later checkpoints, what was recorded later, and the model and
    the rows of its end. Raises OSError."""
    checkpoint_files.go_back(found.path, iteration=found.checkpoint.iteration)
    truncate(found.path.parent, iteration=found.checkpoint.iteration)
    for name in (MODEL_FILE, ROWS_FILE):
        (found.path.parent / name).unlink(missing_ok=True)


def _newest_whole(directory: Path) -> Found:
    warnings: list[str] = []
    damaged: DamagedCheckpoint | None = None
    for path in checkpoint_files.from_newest(directory):
        try:
            found = _read(path)
        except DamagedCheckpoint as error:
            damaged = damaged or error
            warnings.append(str(error))
            continue
        taken = f"; the run goes on from {path}, of iteration {found.checkpoint.iteration}"
        return Found(found.where, found.raw, found.checkpoint, tuple(f"{warning}{taken}" for warning in warnings))
    assert damaged is not None
    raise damaged


def _of_iteration(directory: Path, which: str | int) -> Path:
    """Where it lies: under its number, as the newest, or as the best."""
    if which == BEST:
        return directory / checkpoint_files.BEST_NAME
    iteration = as_iteration(which)
    known = {checkpoint_files.iteration_of(path): path for path in reversed(checkpoint_files.from_newest(directory))}
    if iteration in known:
        return known[iteration]
    path = checkpoint_files.numbered(directory, iteration)
    if path.exists():  # it is damaged, and does not say any more what it is of
        return path
    there = ", ".join(str(number) for number in sorted(number for number in known if number is not None))
    raise UsageError(f"{directory} has no checkpoint of iteration {iteration}; there are {there or 'none'}")


def as_iteration(which: str | int) -> int:
    """Raises UsageError if it is no number."""
    try:
        return int(which)
    except ValueError:
        raise UsageError(f"--from must be newest, best or an iteration, not {which!r}") from None


def _read(path: Path, *, at: int | None = None) -> Found:
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        remedy = "give the result directory of a run that saved a checkpoint"
        if path.name == checkpoint_files.BEST_NAME:
            remedy = "give --keep-best METRIC to the run that is to keep one"
        missing = DamagedCheckpoint if path.name == FILE_NAME else UsageError
        raise missing(f"cannot resume from {path}: {error.strerror}; {remedy}") from None
    except OSError as error:
        raise DamagedCheckpoint(f"cannot resume from {path}: {error.strerror}") from None
    checkpoint = Checkpoint.decode(raw, where=str(path))
    if at is not None and checkpoint.iteration != at:
        raise UsageError(f"{path} is of iteration {checkpoint.iteration}, not {at}")
    try:
        for files in checkpoint.row_files.values():
            require_whole(path.parent / checkpoint.rows_directory, files)
    except DamagedRows as error:
        raise DamagedCheckpoint(f"cannot resume from {path}: {error}") from None
    return Found(str(path), raw, checkpoint)
