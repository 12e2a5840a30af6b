"""Workers and servers of a Ray that a run starts are forks of one process, each as if it had been started by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from paceline.engines.ray.forks import launching, stand_in
from tests.distributed.harness import COLD, PACELINE, Command, wait_until

PROGRAM = """
    import json, os, sys
    import numpy
    file = sys.argv[1]
    told = {
        "parent": os.getppid(), "pid": os.getpid(), "arguments": sys.argv, "directory": os.getcwd(),
        "environment": dict(os.environ), "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)), "drawn": float(numpy.random.rand()), "name": __name__,
        "has_torch": "torch" in sys.modules, "path": sys.path[0], "main": sys.modules["__main__"].__file__,
    }
    with open(file + ".new", "w") as out:
        json.dump(told, out)
    os.rename(file + ".new", file)
    print("said", os.environ["SAID"])
    print("wrong", file=sys.stderr)
"""
RUN = """
    import os, sys, json
    import torch
    import paceline
    from torch.utils.data import DataLoader, TensorDataset

    worker = paceline.init()
    with open(f"{sys.argv[1]}-{worker.rank}", "w") as out:
        json.dump({"parent": os.getppid(), "pid": os.getpid(), "variables": sorted(os.environ),
            "threads": torch.get_num_threads()}, out)
    model = torch.nn.Linear(4, 1)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model, optimizer, loader = worker.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4))
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that all tests here ask."""
    folder = tmp_path_factory.mktemp("launcher")
    for name in ("paceline", "torch", "requests", "random"):  # a launcher's folder may have modules of such names
        written(folder / f"{name}.py", "raise ImportError('another one')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_FORKS", "")
        with contextlib.ExitStack() as until_then:
            with contextlib.chdir(folder):
                settings = until_then.enter_context(launching.served(tmp_path_factory.mktemp("own")))
            assert settings == {"setup_worker_path": stand_in.__file__}
            yield os.environ[stand_in.ADDRESS]


def written(path: Path, text: str) -> Path:
    path.write_text(dedent(text))
    return path


def stand_in_for(
    program: Path, *arguments: object, address: str, context: Mapping[str, Any] | None = None, **more: Any
) -> subprocess.Popen[str]:
    """As Ray's node manager starts it."""
    given = [f"--serialized-runtime-env-context={json.dumps(context or {})}", "--language=PYTHON"]
    return subprocess.Popen(
        [sys.executable, stand_in.__file__, str(program), *map(str, arguments), *given],
        env={**os.environ, stand_in.ADDRESS: address, "SAID": "so"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def told(file: Path) -> dict[str, Any]:
    assert wait_until(file.exists)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_fork_is_as_a_program_that_was_started_there(address: str, tmp_path: Path) -> None:
    program, places = written(tmp_path / "program.py", PROGRAM), [tmp_path / "a", tmp_path / "b"]
    for place in places:
        started = stand_in_for(program, place, address=address, cwd=tmp_path, preexec_fn=lambda: os.nice(3))
        output, errors = started.communicate(timeout=300)
        assert (started.returncode, output, errors) == (0, "said so\n", "wrong\n")
    one, other = map(told, places)
    assert one["parent"] == other["parent"]
    assert one["pid"] != other["pid"]
    assert one["has_torch"]
    assert one["arguments"] == [str(program), str(places[0])]
    assert (one["directory"], one["path"]) == (str(tmp_path), str(tmp_path))
    assert (one["name"], one["main"]) == ("__main__", str(program))
    assert one["niceness"] == os.getpriority(os.PRIO_PROCESS, 0) + 3
    assert one["cores"] == sorted(os.sched_getaffinity(0))
    assert stand_in.ADDRESS not in one["environment"]
    assert one["drawn"] != other["drawn"]


def test_a_stand_in_ends_as_its_fork_does(address: str, tmp_path: Path) -> None:
    leaving = written(tmp_path / "leaving.py", "import sys; sys.exit(7)")
    failing = written(tmp_path / "failing.py", "raise KeyError('nobody')")
    killed = written(tmp_path / "killed.py", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    for program, status in ((leaving, 7), (failing, 1)):
        started = stand_in_for(program, address=address)
        _, errors = started.communicate(timeout=300)
        assert started.returncode == status
        assert ("KeyError: 'nobody'" in errors) == (program is failing)
    started = stand_in_for(killed, address=address)
    started.communicate(timeout=300)
    assert started.returncode not in (0, 1)


WAITING = """
    import os, sys, time
    with open(sys.argv[1], "w") as out:
        out.write(str(os.getpid()))
    time.sleep(600)
"""


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def waiting(address: str, directory: Path, name: str) -> tuple[subprocess.Popen[str], int]:
    started = stand_in_for(written(directory / "waiting.py", WAITING), directory / name, address=address)
    return started, told(directory / name)  # type: ignore[return-value]  # a number


def test_a_fork_ends_with_its_stand_in_and_others_go_on(address: str, tmp_path: Path) -> None:
    one, pid = waiting(address, tmp_path, "one")
    other, other_pid = waiting(address, tmp_path, "other")
    one.kill()
    one.communicate()
    assert wait_until(lambda: is_gone(pid))
    assert not is_gone(other_pid)
    os.kill(other_pid, signal.SIGTERM)
    other.communicate(timeout=300)
    assert other.returncode != 0


def test_the_server_outlives_its_launcher_by_no_more_than_its_forks(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    launcher = f"""
        import os, sys, time
        os.environ["PACELINE_FORKS"] = ""
        from pathlib import Path
        from paceline.engines.ray.forks import launching
        with launching.served(Path({str(tmp_path / "own")!r})):
            print(os.environ["PACELINE_FORKS_AT"], flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", dedent(launcher)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        started, pid = waiting(address, tmp_path, "one")
        server = psutil.Process(pid).ppid()
        process.kill()
    late = stand_in_for(written(tmp_path / "program.py", PROGRAM), tmp_path / "place", address=address)
    assert late.communicate(timeout=300)[0] == "said so\n"
    assert not told(tmp_path / "place")["has_torch"]
    assert not is_gone(pid)
    started.kill()
    started.communicate()
    assert wait_until(lambda: is_gone(pid) and is_gone(server))


def is_left_by(asker: socket.socket) -> bool:
    asker.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionResetError):
        return asker.recv(1) == b""
    return True


def test_who_sends_rubbish_is_left_and_others_are_served(address: str, tmp_path: Path) -> None:
    for rubbish in (b"", b"\0\0", b"\0\0\0\5abc", b"\0\0\0\5nojso", b"\xff\xff\xff\xff"):
        with socket.socket(socket.AF_UNIX) as asker:
            asker.connect(address)
            asker.sendall(rubbish)
            assert is_left_by(asker)
    for length in (5, 2**32 - 1):
        with socket.socket(socket.AF_UNIX) as asker, open(os.devnull) as nothing:
            asker.connect(address)
            socket.send_fds(asker, [length.to_bytes(4, "big")], [nothing.fileno()] * 3)
            asker.sendall(b"nojso")
            assert is_left_by(asker)
    started = stand_in_for(written(tmp_path / "program.py", PROGRAM), tmp_path / "place", address=address)
    started.communicate(timeout=300)
    assert told(tmp_path / "place")["has_torch"]


def test_a_program_starts_by_itself_in_a_folder_that_is_gone(address: str, tmp_path: Path) -> None:
    program = written(tmp_path / "program.py", "import sys; print('torch' in sys.modules)")
    gone = tmp_path / "gone"
    gone.mkdir()
    started = stand_in_for(program, address=address, cwd=gone, preexec_fn=gone.rmdir)
    output, errors = started.communicate(timeout=300)
    assert (started.returncode, output) == (0, "False\n"), errors


@pytest.mark.parametrize("why", ["no server", "variables of its own"])
def test_a_program_starts_by_itself_where_no_fork_can_be_had(why: str, address: str, tmp_path: Path) -> None:
    program, place = written(tmp_path / "program.py", PROGRAM), tmp_path / "place"
    context = {"env_vars": {"MORE": "yes"}} if why == "variables of its own" else {}
    where = str(tmp_path / "nobody") if why == "no server" else address
    started = stand_in_for(program, place, address=where, context=context)
    output, errors = started.communicate(timeout=300)
    assert started.returncode == 0, errors
    assert output == "said so\n"
    found = told(place)
    assert not found["has_torch"]
    assert found["environment"].get("MORE") == context.get("env_vars", {}).get("MORE")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "ps-asp"])
def test_workers_of_a_run_are_forks_unless_that_is_switched_off(strategy: str, tmp_path: Path) -> None:
    script = written(tmp_path / "script.py", RUN)
    parents = {}
    for switch in ("", "off"):
        options = ["--workers", "2", "--strategy", strategy, "--out", str(tmp_path / f"out{switch}")]
        arguments = [PACELINE, "run", str(script), *options, "--", str(tmp_path / f"told{switch}")]
        command = Command(arguments, tmp_path, COLD | {"PACELINE_FORKS": switch})
        try:
            output = command.wait()
            assert command.status == 0, output
            command.assert_nothing_left()
        finally:
            command.close()
        ranks = [json.loads((tmp_path / f"told{switch}-{rank}").read_text()) for rank in range(2)]
        assert all(stand_in.ADDRESS not in rank["variables"] for rank in ranks)
        parents[switch] = [rank["parent"] for rank in ranks]
    assert parents[""][0] == parents[""][1]
    assert parents["off"][0] == parents["off"][1]  # Ray's node manager
