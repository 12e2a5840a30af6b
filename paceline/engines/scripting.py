"""Running a user's script or function inside a worker, and telling how it ended."""

import ast
import errno
import linecache
import os
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.engines import aliases
from paceline.errors import Aborted, BudgetReached, DeadlineExceeded, PacelineError, PeerLost, UsageError, suggest

_OWN_DIRECTORY = os.fspath(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True)
class Script:
    """A script as text, so that every host runs what the launcher read."""

    path: str
    source: str
    arguments: tuple[str, ...]
    working_directory: str
    aliases: tuple[str, ...] = ()
    """Packages that it may import though they are not installed."""


Program = Script | Callable[[], Any]


def read_script(script: str | Path, arguments: Sequence[str], *, may_alias: bool = True) -> Script:
    """A script as it lies there now.

    Args:
        may_alias: Paceline may stand in for packages that the script mentions and that are not installed.

    Raises:
        UsageError: it cannot be read, or is not Python.
    """
    path = Path(script)
    try:
        source = path.read_text(encoding="utf-8-sig")
        compile(source, str(path), "exec", dont_inherit=True)
    except OSError as error:
        near = suggest(path.name, [p.name for p in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise UsageError(f"cannot read the script {path}: {error.strerror}{near}") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"the script {path} is not valid Python: {error}") from None
    missing = aliases.missing(source) if may_alias else ()
    return Script(str(path.resolve()), source, tuple(arguments), os.getcwd(), missing)


def is_of_horovod(script: Script) -> bool:
    """Whether it exchanges through Horovod's interface, Paceline's here, and imports nothing else of Paceline's."""
    with warnings.catch_warnings(action="ignore"):  # `read_script` has given them
        modules = set(_imported(ast.parse(script.source, script.path)))
    ours = {name for name in modules if f"{name}.".startswith("paceline.")}
    of_horovod = {name for name in modules if f"{name}.".startswith("paceline.horovod.")}
    if "horovod" in script.aliases:
        of_horovod |= {f"paceline.{name}" for name in modules if name.startswith("horovod.")}
    return ours <= of_horovod and any(f"{name}.".startswith("paceline.horovod.torch.") for name in of_horovod)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Modules, and what may be modules of a package, by their full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@dataclass(frozen=True)
class Outcome:
    num_steps: int = 0
    """Steps it had done; of a server, updates."""
    error: str | None = None
    """`ErrorType: message`, if it failed."""
    message: str = ""
    traceback: str = ""
    """The script's frames; empty where the message says everything."""
    is_consequence: bool = False
    """The failure only says that someone else failed."""
    is_usage: bool = False
    """The failure is that something was asked for that cannot be had."""
    is_memory: bool = False
    """The failure is that memory has run out."""


class ScriptExit(PacelineError):
    """A script ended itself with a status that is not 0."""


def run_program(program: Program) -> None:
    """Run it to its end, as `sys.exit(0)` is, or `next()` of a loader that the run's end has left nothing.

    Raises:
        ScriptExit: for another status. So is raised what it raises.
    """
    from paceline.late_compiler import load_compiler_late  # which loads torch, as the program will

    load_compiler_late()
    try:
        if isinstance(program, Script):
            _run_script(program)
        else:
            program()
    except BudgetReached:
        pass
    except (StopIteration, RuntimeError) as error:
        if not _is_of_next(error) or not _has_run_ended():
            raise
        _say_where_it_ended(error)
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise ScriptExit(f"the script ended with sys.exit({exit_.code!r})") from None


def _is_of_next(error: Exception) -> bool:
    """Whether the script, or a generator of its own, has called `next()` where there was nothing more, as after the
    run's end."""
    return isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration)


def _say_where_it_ended(error: Exception) -> None:
    """It may have been another iterator's end, and a mistake: nobody can tell."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = "next() found nothing more, since the run has ended; the script ends here, and what follows is not done"
    warnings.warn_explicit(message, UserWarning, last.filename, last.lineno or 0)


def _has_run_ended() -> bool:
    from paceline.engines.world import current  # which loads torch, and nobody waits for that to read a command

    world = current()
    return world is not None and world.has_ended()


_REMEDIES = {
    "modified by an inplace operation": "If what the graph has kept is a parameter's gradient: its memory takes the "
    "next one, and what all workers make of it. Keep a copy in another graph: parameter.grad.clone()",
    "Default process group has not been initialized": "Workers are joined without one: leave DistributedDataParallel "
    "out, since prepare does what it did, or call torch.distributed.init_process_group('paceline') first",
    **dict.fromkeys(
        map(repr, ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        "If that is torchrun's variable: workers are told by worker.rank, worker.local_rank and worker.size",
    ),
}
"""By the words of torch and Python."""


def outcome_of(error: BaseException, *, num_steps: int) -> Outcome:
    name = type(error).__name__
    message = str(error)
    if isinstance(error, RuntimeError | ValueError | KeyError):
        remedies = [remedy for words, remedy in _REMEDIES.items() if words in message]
        message = ". ".join([message.rstrip(". \n"), *remedies]) if remedies else message
    return Outcome(
        num_steps=num_steps,
        error=f"{name}: {message}" if message else name,
        message=message or name,
        traceback="" if isinstance(error, PacelineError) else _script_traceback(error),
        is_consequence=isinstance(error, PeerLost | Aborted | DeadlineExceeded),
        is_usage=isinstance(error, UsageError),
        is_memory=is_lack_of_memory(error),
    )


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether memory has run out, of the host or of what this process may have; torch says so in a RuntimeError."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_torchs = isinstance(error, RuntimeError) and re.search(r"can't allocate memory|out of memory", str(error))
    return isinstance(error, MemoryError) or bool(is_torchs)


def _script_traceback(error: BaseException) -> str:
    """The traceback without Paceline's frames, except where the error arose in them."""
    whole = traceback.TracebackException.from_exception(error)
    for part in _chain(whole):
        if part.stack and not _is_own(part.stack[-1]):
            part.stack = traceback.StackSummary.from_list([frame for frame in part.stack if not _is_own(frame)])
    return "".join(whole.format())


def _is_own(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OWN_DIRECTORY) and frame.filename != sys.argv[0]


def _chain(error: traceback.TracebackException) -> list[traceback.TracebackException]:
    found = [error]
    for linked in (error.__cause__, error.__context__, *(error.exceptions or ())):
        if linked is not None:
            found += _chain(linked)
    return found


def _run_script(script: Script) -> None:
    """As `python script.py arguments` would, in a fresh `__main__`."""
    if os.path.isdir(script.working_directory):
        os.chdir(script.working_directory)
    aliases.install(script.aliases)
    sys.argv = [script.path, *script.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script.path)))
    main = types.ModuleType("__main__")
    main.__file__ = script.path
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    # Tracebacks show the script's lines on hosts that do not have the file.
    linecache.cache[script.path] = (len(script.source), None, script.source.splitlines(keepends=True), script.path)
    exec(compile(script.source, script.path, "exec", dont_inherit=True), main.__dict__)
