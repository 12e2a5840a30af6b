"""The servers of `tests/programs.py`: each program that they are asked for runs in a fork of one.

One has loaded Ray. Ray's core reads its settings again in each fork, and a program with other ones for Ray's Python
starts cold. But which job a worker of Ray's is for, the core reads once: so workers are forks of a server without Ray.

The fork is in the asker's network namespace, on the asker's cores, and shows its own environment to who looks at /proc.
Other libraries that the server has loaded have read its own variables, as OMP_NUM_THREADS, and not the program's.

Nor does a program take apart at its end what the server has loaded, which would be half a second of a core: it does
what is to be done at exit, and is gone.

A program that works so may still fail where it starts by itself. It may not import all that it uses. And all forks
have the server's seed of hashes (PYTHONHASHSEED), so that ranks go through a set in the same order, which they do not
elsewhere. So some tests start programs cold: on Ray test_deaths.py, on servers test_security.py, README.md's commands,
on several hosts test_security.py and test_cluster_page.py, under torchrun test_entry_points.py, and served federated
ones the commands of docs/federated.md.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import numpy

from tests import ray_forks
from tests.programs import ADDRESS, READY

LOADED = (
    *("torch._dynamo", "torch.distributed.run", "pandas", "scipy.stats", "zmq", "rich.progress", "typer", "jinja2"),
    *("yaml", "paceline.training.worker", "paceline.strategies", "paceline.comm.process_group", "paceline.nn"),
    *("paceline.comm.hierarchical", "paceline.comm.servers.service", "paceline.comm.servers.group"),
    *("paceline.comm.socket_mailbox", "paceline.planner", "paceline.engines.ray.control", "paceline.engines.striking"),
    *("paceline.running.simulating", "paceline.running.watching", "paceline.data", "paceline.models", "paceline.lab"),
    *("paceline.lab.comparing", "paceline.lab.tracking", "paceline.lab.virtual_cluster", "paceline.lab.figures"),
    *("paceline.lab.html_page", "paceline.horovod.torch", "paceline.torch_backend.process_group"),
    *("google.protobuf.json_format", "jsonschema", "requests", "msgpack", "filelock"),  # what Ray imports
)
RAYS_AGENT = "ray._private.runtime_env.agent.main"  # puts folders of its own onto the path
LOADED_WITH_RAY = (
    *("ray", "ray.scripts.scripts", "ray.util.placement_group", "ray.util.state", "ray.dashboard.agent"),
    *(RAYS_AGENT, "paceline.engines.ray.worker_actor"),
    *("paceline.engines.ray.server_actor", "paceline.running.launch", "paceline.cli"),
)
_WATCHED_BY_PIPE = "RAY_enable_pipe_based_agent_to_parent_health_check"
_EVENTS = select.POLLIN | select.POLLHUP
_CREDENTIALS = struct.Struct("3i")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    sys.path.pop(0)  # this folder, whose modules bear the names of others
    for name in LOADED:
        import_module(name)
    assert "ray" not in sys.modules
    programs, workers = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
    with_ray = os.fork()
    (programs if with_ray else workers).close()  # whoever asks one that has ended is refused
    settings: dict[str, str | None] = {}
    if with_ray == 0:
        settings = _load_ray()
        os.write(1, READY)
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()
    sys.path.insert(0, "")  # where a program's own folder will stand
    with programs, workers:
        asked = _Server(workers if with_ray else programs).serve()
    if asked is not None:
        _run(asked, settings)
    if with_ray:
        os.waitpid(with_ray, 0)


def _folder_of(module: str) -> str:
    return os.path.dirname(str(sys.modules[module].__file__))


class _Noting(os._Environ):  # type: ignore[type-arg]
    """Notes which variables are asked for."""

    asked: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return str(super().__getitem__(name))


def _load_ray() -> dict[str, str | None]:
    """Gives the settings that Ray's Python has read from the environment meanwhile."""
    ray_forks.use_in_program()
    before, kind = dict(os.environ), type(os.environ)
    os.environ.__class__ = _Noting
    for name in LOADED_WITH_RAY:
        import_module(name)
    os.environ.__class__ = kind
    sys.path[:] = [each for each in sys.path if not each.startswith(_folder_of(RAYS_AGENT))]
    asked = {name for name in _Noting.asked if name.startswith("RAY_")} - {"RAY_CLIENT_MODE", _WATCHED_BY_PIPE}
    return {name: before.get(name) for name in asked}  # without what Ray itself sets


class _Server:
    """Forks what is asked for, and tells the asker how it ended; whose asker has ended, is ended."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._forks: dict[int, tuple[int, socket.socket]] = {}  # by the file that tells of its end: process, asker
        self._askers: dict[int, int] = {}  # an asker's file: its process
        self._poll = select.poll()

    def serve(self) -> dict[str, Any] | None:
        """In a fork: what it is to run. In the server: None, once nobody needs it any more."""
        self._poll.register(self._door, select.POLLIN)
        self._poll.register(0, _EVENTS)
        while True:
            file = self._poll.poll()[0][0]  # one at a time: what is closed here may bear another's number at once
            if file == 0:
                for process, _ in self._forks.values():
                    os.kill(process, signal.SIGKILL)
                return None
            if file in self._forks:
                self._ended(file)
            elif file in self._askers:
                self._poll.unregister(file)
                with suppress(ProcessLookupError):
                    os.kill(self._askers.pop(file), signal.SIGKILL)
            elif (asked := self._fork(self._door.accept()[0])) is not None:
                return asked

    def _fork(self, asker: socket.socket) -> dict[str, Any] | None:
        streams: list[int] = []
        try:
            length, streams, *_ = socket.recv_fds(asker, 4, 3)
            if len(length) < 4 or len(streams) != 3:
                raise EOFError
            told = asker.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
            asked: dict[str, Any] = json.loads(told)
        except (EOFError, ConnectionError, ValueError):  # whoever asks has ended meanwhile
            asker.close()
            for stream in streams:
                os.close(stream)
            return None
        asked["asker"] = _CREDENTIALS.unpack(asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        process = os.fork()
        if process == 0:
            for file, (_, other) in self._forks.items():
                os.close(file)
                other.close()
            asker.close()
            self._door.close()
            return asked | {"streams": streams}
        for stream in streams:
            os.close(stream)
        end = os.pidfd_open(process)
        self._forks[end] = process, asker
        self._askers[asker.fileno()] = process
        self._poll.register(end, select.POLLIN)
        self._poll.register(asker, _EVENTS)
        with suppress(ConnectionError):
            asker.sendall(process.to_bytes(4, "big"))
        return None

    def _ended(self, file: int) -> None:
        process, asker = self._forks.pop(file)
        self._poll.unregister(file)
        os.close(file)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if self._askers.pop(asker.fileno(), None) is not None:
            self._poll.unregister(asker)
        with suppress(ConnectionError):
            asker.sendall(status.to_bytes(4, "big", signed=True))
        asker.close()


def _run(asked: dict[str, Any], settings: Mapping[str, str | None]) -> NoReturn:
    """Become the program: nothing of the server but its modules is left."""
    os.setsid()
    for stream, own in zip(asked["streams"], (0, 1, 2), strict=True):
        os.dup2(stream, own)
        os.close(stream)
    _go_where(asked["asker"])
    os.chdir(asked["directory"])
    _take_environment(asked["environment"])
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execv(sys.executable, [sys.executable, *asked["arguments"]])
    if "ray" in sys.modules:
        _have_ray_read_again()
    else:
        ray_forks.use_in_program()
    numpy.random.seed()  # as in a process of its own
    for name, does in ((signal.SIGINT, signal.default_int_handler), (signal.SIGCHLD, signal.SIG_DFL)):
        signal.signal(name, does)
    sys.stdout.reconfigure(line_buffering="PYTHONUNBUFFERED" in os.environ or os.isatty(1))  # type: ignore[union-attr]
    if ADDRESS in os.environ:
        sys.meta_path.insert(0, ray_forks.OnceLoaded({"paceline.horovod.processes": _fork_workers}))
    status = 0
    try:
        _be(*asked["arguments"])
    except SystemExit as end:
        status = _status_of(end)
    except (Exception, KeyboardInterrupt) as error:
        told = error.__traceback__
        while told is not None and told.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            told = told.tb_next
        sys.excepthook(type(error), error.with_traceback(told), told)
        if isinstance(error, KeyboardInterrupt):
            _end_interrupted()
        status = 1
    _do_what_is_to_be_done_at_exit()
    os._exit(status)


def _have_ray_read_again() -> None:
    """Its core, which has read settings and token in the server; and agents, how they learn that their node is gone."""
    ray: Any = import_module("ray._raylet")
    ray.Config.initialize("")
    ray.AuthenticationTokenLoader.instance().reset_cache()
    agents: Any = import_module("ray.dashboard.consts")
    agents.PARENT_HEALTH_CHECK_BY_PIPE = agents.env_bool(_WATCHED_BY_PIPE, False)


def _be(file: str, *arguments: str) -> None:
    """A file, or `-m` and a module, with its arguments."""
    if file == "-m":
        sys.argv, sys.path[0] = list(arguments), os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.argv, sys.path[0] = [file, *arguments], os.path.dirname(os.path.realpath(file))
    program = ModuleType("__main__")
    program.__dict__.update(__file__=file, __builtins__=builtins, __spec__=None)
    sys.modules["__main__"] = program
    exec(compile(Path(file).read_bytes(), file, "exec"), program.__dict__)


def _status_of(end: SystemExit) -> int:
    """As Python has it: a number, or words on the way out."""
    if isinstance(end.code, int):
        return end.code & 0xFF
    if end.code is None:
        return 0
    print(end.code, file=sys.stderr)
    return 1


def _do_what_is_to_be_done_at_exit() -> None:
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _fork_workers(processes: Any) -> None:
    """Of this module are workers of Horovod's launcher, which it starts by the path of its Python. Commands that these
    start have files of theirs, which reach no fork."""
    stand_in = os.path.join(os.path.dirname(os.environ[ADDRESS]), "bin", "python")
    command = [stand_in, *processes._worker()[1:]]
    processes._worker = lambda: command


def _end_interrupted() -> None:
    """As Python does: by the signal, after what is to be done at exit."""
    _do_what_is_to_be_done_at_exit()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _go_where(asker: int) -> None:
    """Into the asker's network, and onto its cores."""
    for name in ("net", "mnt"):
        theirs = f"/proc/{asker}/ns/{name}"
        if os.stat(theirs).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            file = os.open(theirs, os.O_RDONLY)
            if _libc.setns(file, 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {theirs}")
            os.close(file)
    os.sched_setaffinity(0, os.sched_getaffinity(asker))


def _take_environment(variables: dict[str, str]) -> None:
    """For this process, and in the place where /proc shows it: tests find a command's processes by a variable."""
    servers, programs = (_python_path(each) for each in (os.environ, variables))
    sys.path[1:] = [*programs, *(each for each in sys.path[1:] if each not in servers)]
    os.environ.clear()
    os.environ.update(variables)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[47:49])
    shown = b"".join(f"{name}={value}\0".encode() for name, value in sorted(variables.items(), key=_tests_first))
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, min(len(shown), end - start - 1))


def _python_path(variables: Mapping[str, str]) -> list[str]:
    return [each for each in variables.get("PYTHONPATH", "").split(os.pathsep) if each]


def _tests_first(variable: tuple[str, str]) -> bool:
    return not variable[0].startswith("PACELINE_TEST")


if __name__ == "__main__":
    main()
