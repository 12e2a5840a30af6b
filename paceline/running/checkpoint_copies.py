"""Copies of a run's checkpoints at an address of fsspec's, for a disk that goes with its machine."""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, final

from paceline import durable, sealing
from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.config import RunConfig
from paceline.engines.standing import Watcher
from paceline.errors import RunFailed, UsageError
from paceline.running import manifest
from paceline.running.patience import NoAnswer, Pulse, awaited
from paceline.running.places import Place, is_address
from paceline.running.resuming import BEST, NEWEST, Found, as_iteration
from paceline.strategies.base import Strategy

T = TypeVar("T")
_LOOK_S = 0.5
_SAY_S = 2.0
_ANSWER_S = 120.0  # before the run, a place that stands still for so long is refused
_STILL_S = 60.0  # while the run trains, its place is named after so long
_END_S = 600.0  # when the run has ended well, its place is given up after so long
_CUT_S = 30.0  # after an interrupt or a failure: who has sent it may not wait for longer
_UNDER_WAY = ".checkpoint-copied.pt"


class NothingThere(UsageError):
    """An address has no checkpoint yet."""


def _name(iteration: int) -> str:
    return f"checkpoint-{iteration}.pt"


def _iterations(place: Place) -> list[int]:
    """The iterations of the checkpoints that are there, from the newest to the oldest."""
    numbers = (name.removeprefix("checkpoint-").removesuffix(".pt") for name in place.names())
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def find(address: str, which: str | int = NEWEST) -> Found:
    """The copy to go on from; where the newest is damaged or cannot be read, the one before.

    Args:
        which: `newest`, or an iteration.

    Raises:
        NothingThere: the address has no checkpoint.
        UsageError: it has not the one that is asked for, none that is there can be read, or it does not answer.
    """
    if which == BEST:
        raise UsageError(f"{address} has copies of the newest checkpoints, not of the best; leave --from out")
    pulse = Pulse()
    return awaited(lambda: _found(Place.at(address, pulse), which), pulse, where=address, silent_s=_ANSWER_S)


def _found(place: Place, which: str | int) -> Found:
    address, there = place.address, _iterations(place)
    if not there:
        raise NothingThere(f"{address} has no checkpoint to go on from")
    wanted = there if which == NEWEST else [number for number in there if number == as_iteration(which)]
    if not wanted:
        numbers = ", ".join(map(str, sorted(there)))
        raise UsageError(f"{address} has no checkpoint of iteration {which}; there are {numbers}")
    errors: list[UsageError] = []
    for iteration in wanted:
        where = f"{address}/{_name(iteration)}"
        try:
            raw = _read(place, iteration)
            checkpoint = Checkpoint.decode(raw, where=where)
        except UsageError as error:
            errors.append(error)
            continue
        taken = f"; the run goes on from {where}"
        return Found(where, raw, checkpoint, tuple(f"{error}{taken}" for error in errors))
    raise errors[0]


def _read(place: Place, iteration: int) -> bytes:
    """Raises UsageError that names the copy."""
    try:
        return place.read(_name(iteration))
    except UsageError as error:
        raise UsageError(f"{_name(iteration)}: {error}") from None


def are_one(address: str, other: str) -> bool:
    """Whether both name the same place. Raises UsageError if one is none."""
    one, two = Place.at(address), Place.at(other)
    return (one.files, one.root) == (two.files, two.root)


def id_of(run: str | Path) -> str | None:
    """The id of the run whose result directory, or copies, are there; none where nothing says it."""
    with contextlib.suppress(UsageError, ValueError):
        if is_address(run):
            pulse = Pulse()
            return awaited(lambda: _id_at(Place.at(str(run), pulse)), pulse, where=str(run), silent_s=_ANSWER_S)
        return cast(str | None, manifest.read(Path(run)).get("id"))
    return None


def _id_at(place: Place) -> str | None:
    """The id of the run whose copies are there; none where no manifest says it."""
    with contextlib.suppress(UsageError, ValueError):
        return cast(str | None, json.loads(place.read(manifest.FILE_NAME)).get("id"))
    return None


@final
class CheckpointCopies:
    """Copies the newest checkpoint of a result directory whenever it is another one, in a thread beside the run.

    An address has the copies of one run: `checkpoint-ITERATION.pt`, of which it keeps as many as the directory, and the
    run's manifest, whose `id` says which run that is. The thread looks at the directory alone, so that engines need not
    know of it.

    Raises:
        UsageError: the address cannot be reached.
    """

    def __init__(self, address: str, directory: Path, *, keep: int) -> None:
        if not is_address(address):
            raise UsageError(f"--copy-checkpoints {address}: give an address, as file://{Path(address).resolve()}")
        self._pulse, self._directory, self._keep = Pulse(), directory, keep
        self._is_over = threading.Event()
        self._place = self._awaited(lambda: Place.at(address, self._pulse), where=address)
        self._newest = directory / FILE_NAME
        self._began_at = 0
        self._dropped: list[int] = []
        self._seen: tuple[int, int] | None = None
        self._failure: str | None = None
        self._is_copying = False
        self._described: dict[str, Any] = {}

    def claim(self, described: dict[str, Any], *, iteration: int, drops_later: bool) -> None:
        """Take the address for this run. It has to be empty, or to have the run's own copies, or those that the run
        goes on from if nothing says any more whose they are.

        Args:
            described: what the manifest says.
            iteration: at which the run begins.
            drops_later: later copies than that go once there is a new one.

        Raises:
            UsageError: the address cannot be written, has another run's copies, or later ones, which are to stay, or it
                does not answer.
        """
        claim = partial(self._claim, described, iteration=iteration, drops_later=drops_later)
        self._awaited(claim, where=self._place.address)

    def _claim(self, described: dict[str, Any], *, iteration: int, drops_later: bool) -> None:
        address, there = self._place.address, _iterations(self._place)
        is_taken = bool(there) or self._place.has(manifest.FILE_NAME)
        resumed = described.get("resumed_from")
        goes_on_here = resumed is not None and is_address(resumed) and are_one(resumed, address)
        whose = _id_at(self._place)
        if is_taken and whose != described["id"] and not (whose is None and goes_on_here):
            raise UsageError(f"{address} is another run's; give an empty address, or --resume {address}")
        later = [number for number in there if number > iteration]
        if later and not drops_later:
            raise UsageError(
                f"{address} has a later checkpoint, of iteration {later[0]}: --resume {address} goes on from there, "
                f"and --from {iteration} goes back"
            )
        if self._is_over.is_set():  # the run was refused before the place answered
            return
        self._began_at, self._dropped, self._described = iteration, later, described
        self._place.make()
        self._describe()

    @contextlib.contextmanager
    def kept(self, say: Callable[[str], None]) -> Iterator[None]:
        """Meanwhile what becomes the newest is copied; in the end the last one is waited for. What cannot be copied is
        said, and the run goes on.

        Raises:
            RunFailed: the last one could not be copied, though the run has ended well.
        """
        # Nobody waits for the threads at the end of the process: a network that hangs keeps no run from ending.
        thread = threading.Thread(target=self._serve, args=[say], name="paceline-copies", daemon=True)
        thread.start()
        threading.Thread(target=self._watch, args=[say], name="paceline-copies-watched", daemon=True).start()
        try:
            yield
        except BaseException:
            self._end(thread, say, limit_s=_CUT_S)
            raise
        self._end(thread, say)
        failure = f"nothing of it has moved for {_END_S:g} s" if thread.is_alive() else self._failure
        if failure is not None:
            where = f"in {self._directory}, and not at {self._place.address}"
            raise RunFailed(f"the run has ended well, but its last checkpoint is {where}: {failure}")

    def _end(self, thread: threading.Thread, say: Callable[[str], None], *, limit_s: float = math.inf) -> None:
        """Have the last one copied, for so long, and while something moves."""
        self._pulse.beat()  # the copy before may be hours old
        self._is_over.set()
        thread.join(_SAY_S)
        if thread.is_alive():
            say(f"copying the last checkpoint to {self._place.address}")
        ends_s = time.monotonic() + limit_s
        while thread.is_alive() and self._pulse.silent_s < _END_S and time.monotonic() < ends_s:
            thread.join(_LOOK_S)

    def _watch(self, say: Callable[[str], None]) -> None:
        """Say it where a copy stands still, once each time."""
        was_still = False
        while not self._is_over.wait(_LOOK_S):
            is_still = self._is_copying and self._pulse.silent_s > _STILL_S
            if is_still and not was_still:
                say(f"a copy to {self._place.address} has stood still for {_STILL_S:g} s; the run goes on")
            was_still = is_still

    def _awaited(self, work: Callable[[], T], *, where: str) -> T:
        try:
            return awaited(work, self._pulse, where=where, silent_s=_ANSWER_S)
        except NoAnswer:
            self._is_over.set()
            raise

    def _serve(self, say: Callable[[str], None]) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._look(say)
        if self._failure is not None:
            self._seen = None  # once more
        self._look(say)

    def _look(self, say: Callable[[str], None]) -> None:
        known = self._known()
        if known is None or known == self._seen:
            return
        self._seen = known
        copied = self._directory / _UNDER_WAY
        self._pulse.beat()
        self._is_copying = True
        try:
            durable.also(self._newest, copied)  # the run may have a newer one at any time
            self._copy(copied)
            self._failure = None
        except Exception as error:  # each file system has errors of its own
            self._failure = f"{type(error).__name__}: {error}"
            say(f"a checkpoint is not copied to {self._place.address}: {self._failure}")
        finally:
            self._is_copying = False
            copied.unlink(missing_ok=True)

    def _known(self) -> tuple[int, int] | None:
        """What tells the newest checkpoint from others, if there is one."""
        try:
            found = self._newest.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _copy(self, source: Path) -> None:
        iteration = sealing.facts_of(source)["iteration"]
        is_there = iteration == self._began_at and self._place.size_of(_name(iteration)) == source.stat().st_size
        if not is_there:
            self._place.put(source, _name(iteration))
        if self._described and not self._place.has(manifest.FILE_NAME):
            self._describe()
        for number in self._dropped:
            if number != iteration:
                self._place.remove(_name(number))
        self._dropped.clear()
        for surplus in _iterations(self._place)[self._keep :]:
            self._place.remove(_name(surplus))

    def _describe(self) -> None:
        """Write down whose copies the address has: without it no run could claim them again."""
        self._place.write(manifest.FILE_NAME, json.dumps(self._described, indent=2).encode())


def claimed(
    config: RunConfig, directory: Path, strategy: Strategy, described: dict[str, Any], *, began_at: int, goes_back: bool
) -> CheckpointCopies | None:
    """What copies the run's checkpoints, if they are to be copied. Raises UsageError if they cannot be.

    Args:
        began_at: the iteration of the checkpoint that the run goes on from.
        goes_back: it is not the newest of those that there were.
    """
    if config.copy_checkpoints is None:
        return None
    if strategy.table_files() is not None:
        raise UsageError("--copy-checkpoints copies no rows that servers have in files; leave it or table_dir out")
    copies = CheckpointCopies(config.copy_checkpoints, directory, keep=config.keep_checkpoints)
    copies.claim(described, iteration=began_at, drops_later=goes_back)
    return copies


def kept(copies: CheckpointCopies | None, watcher: Watcher) -> contextlib.AbstractContextManager[None]:
    """As the copies' own, where there are any."""
    return contextlib.nullcontext() if copies is None else copies.kept(partial(watcher.on_output, "run"))
