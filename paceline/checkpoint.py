"""What a run needs to go on: one weights-only torch file, the same whatever the strategy and the number of servers."""

import copy
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pickle import PickleError
from typing import Any, Literal

import torch
from torch import Tensor

from paceline import sealing
from paceline.errors import UsageError
from paceline.row_file import RowFile, directory_of_plain, files_of_plain

FILE_NAME = "checkpoint.pt"
_FORMAT = 6
_READABLE = (1, 2, 3, 4, 5, 6)
_FIRST_SEALED = 3


class DamagedCheckpoint(UsageError):
    """A file that cannot be read as the checkpoint that it was, if it was one."""


@dataclass(frozen=True)
class WorkerState:
    """Where one worker was."""

    steps: int
    samples: int
    epoch: int
    num_batches_done: int
    random_state: dict[str, Any]
    stream: Any = None
    """The iterable data set's own state there, if it has one."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """The model's, as this worker has them; the checkpoint's model holds their mean."""
    own: dict[str, Tensor] = field(default_factory=dict)
    """What the strategy keeps for this worker alone, by name."""
    fates: dict[str, Literal["average", "sum", "reset", "same"]] = field(default_factory=dict)
    """What becomes of each with another number of workers, or under another strategy. What all workers have the same
    is the first one's alone."""
    beside: dict[str, tuple[int, int, Any]] = field(default_factory=dict)
    """For every loader after the first, by name: epoch, batches done, and the data set's state."""
    script: dict[str, Any] | None = None
    """The optimizer's `groups`, and the states of what else was given to `prepare` (`extra`), of a worker that goes its
    own way through its script; none: they are as the first one's."""


@dataclass(frozen=True)
class Checkpoint:
    """A run at one iteration."""

    iteration: int
    time_s: float
    """The time on the training clock."""
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """Keyed `<parameter index>.<state name>`, full tensors."""
    groups: list[dict[str, Any]]
    """Hyperparameters of the optimizer's groups."""
    workers: list[WorkerState]
    seed: int
    strategy: str = ""
    """The kind of strategy that it was taken under."""
    extra: dict[str, Any] = field(default_factory=dict)
    """State of what else was given to `prepare`, by name."""
    data: dict[str, Any] = field(default_factory=dict)
    """What tells the data and its batches from others, by name."""
    looks: dict[str, list[Any]] = field(default_factory=dict)
    """By the loader's name, marks of a few samples of its data as the run began."""
    optimizers: list[str] = field(default_factory=list)
    """Names of several, in their order; of one, none."""
    optimizer_kinds: list[str] = field(default_factory=list)
    """The class of each; of older versions, none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """By which the best checkpoint is chosen, if this model was evaluated."""
    rows: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By the table's name, what `Table.state` gives: the keys of all rows that were ever updated, the rows, and their
    optimizer's state."""

    rows_directory: str = ""
    """The directory beside the checkpoint in which servers have written their rows themselves; empty: they have not."""
    row_files: dict[str, list[RowFile]] = field(default_factory=dict)
    """The files in that directory, by the table's name."""

    def encode(self) -> bytes:
        """As bytes of a weights-only torch file, sealed (`sealing.py`) with iteration and metrics. Raises UsageError as
        `plain`."""
        buffer = io.BytesIO()
        torch.save({"format": _FORMAT, **self.plain()}, buffer)
        facts = {"iteration": self.iteration, "metrics": self.metrics, "rows": self.rows_directory}
        sealing.seal(buffer, facts)
        return buffer.getvalue()

    def require_plain(self) -> None:
        """Raises UsageError if weights-only torch files cannot hold something that the script has brought."""
        plain_script(self.groups, self.extra)

    def plain(self) -> dict[str, Any]:
        """As plain data and tensors. Raises UsageError as `require_plain`."""
        self.require_plain()
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        content["groups"] = plain_groups(self.groups)
        content["workers"] = [copy.deepcopy(vars(worker)) for worker in self.workers]
        content["row_files"] = {table: [list(file) for file in files] for table, files in self.row_files.items()}
        return content

    @classmethod
    def of_plain(cls, content: dict[str, Any]) -> "Checkpoint":
        """Makes the checkpoint again that `plain` described. Raises TypeError, LookupError or ValueError if the content
        is something else."""
        workers = [WorkerState(**worker) for worker in content.pop("workers")]
        files = files_of_plain(content.pop("row_files", {}))
        directory = directory_of_plain(content.pop("rows_directory", ""), is_needed=bool(files))
        return cls(workers=workers, rows_directory=directory, row_files=files, **content)

    @classmethod
    def decode(cls, raw: bytes, *, where: str) -> "Checkpoint":
        """Read what `encode` wrote; nothing is unpickled freely.

        Raises:
            DamagedCheckpoint: it is no checkpoint, or not what was written; the message says `where`.
            UsageError: it is of another version.
        """
        try:
            is_sealed = sealing.is_sealed(raw)
            _require_sound(raw, is_sealed=is_sealed)
            content = torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
            written_as = content.pop("format")
            if written_as not in _READABLE:
                raise UsageError(f"{where} is a checkpoint of another version of Paceline")
            if written_as >= _FIRST_SEALED and not is_sealed:
                raise ValueError("its checksum is missing")
            return cls.of_plain(content)
        except UsageError:
            raise
        except (LookupError, TypeError, AttributeError, RuntimeError, EOFError, ValueError, PickleError) as error:
            raise DamagedCheckpoint(f"{where} is no checkpoint, or a damaged one: {error}") from None


def _require_sound(raw: bytes, *, is_sealed: bool) -> None:
    """Raises ValueError if the file is not as it was written. Older ones have a checksum of each part alone, which
    torch writes but does not look at."""
    if is_sealed:
        sealing.require_whole(raw)
        return
    try:
        archive = zipfile.ZipFile(io.BytesIO(raw))
        # torch reads nothing of a part that is marked as a directory, which Python does not look at
        marked = (each.filename for each in archive.infolist() if each.external_attr)
        damaged = next(marked, None) or archive.testzip()
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from None
    if damaged is not None:
        raise ValueError(f"{damaged} is not as it was written")


def _as_float(value: Any) -> Any:
    """numpy's float64, which learning-rate schedules often return, is a float but no plain data."""
    return float(value) if isinstance(value, float) else value


def plain_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hyperparameters of an optimizer's groups as plain data. Raises UsageError as `require_plain`."""
    found = [{name: _as_float(value) for name, value in group.items()} for group in groups]
    for index, group in enumerate(found):
        for name, value in group.items():
            require_plain(f"{name!r} of the optimizer's group {index}", value)
    return found


def plain_script(groups: list[dict[str, Any]], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Gives `WorkerState.script` of an optimizer's groups and of other states. Raises UsageError as `require_plain`."""
    for name, state in extra.items():
        require_plain(f"the state of {name!r}", state)
    return {"groups": plain_groups(groups), "extra": dict(extra)}


def require_plain(what: str, value: Any) -> None:
    """Raises UsageError if the value would need free unpickling."""
    if value is None or type(value) in (bool, int, float, str):
        return
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (PickleError, AttributeError, TypeError) as error:
        raise UsageError(
            f"a checkpoint holds plain data and tensors only, but {what}, a {type(value).__name__}, is or holds "
            "other; make it of numbers, strings, tensors, lists and dicts"
        ) from error
