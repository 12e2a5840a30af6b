"""Programs that are forked start and end as others do: what tests of commands rely on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.namespaces import Network
from tests import programs, ray_forks
from tests.distributed.harness import wait_until
from tests.programs import ADDRESS, Program

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("program_forks")]
TELLS = """
import atexit, json, os, sys
atexit.register(print, "at exit")
if __name__ == "__main__":
    print(json.dumps([sys.argv, os.getcwd(), dict(os.environ), sys.path[0]]))
    sys.exit(int(sys.argv[1]))
"""
WAITS = "import sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(600)\n"


def started(directory: Path, text: str, *arguments: str, **variables: str) -> Program:
    script = directory / "script.py"
    script.write_text(text)
    with open(os.devnull) as nothing, (directory / "said").open("w") as said:
        return Program(
            [str(script), *arguments],
            directory=directory,
            environment=variables,
            streams=(nothing.fileno(), said.fileno(), said.fileno()),
        )


@pytest.fixture
def waiting(tmp_path: Path) -> Program:
    program = started(tmp_path, WAITS, str(tmp_path / "begun"), PACELINE_TEST_TAG="found")
    assert wait_until((tmp_path / "begun").exists)
    return program


def test_a_program_finds_what_it_is_given_and_nothing_else(tmp_path: Path) -> None:
    assert started(tmp_path, TELLS, "3", "b", SOME="thing").wait() == 3
    told, last = (tmp_path / "said").read_text().splitlines()
    script = str(tmp_path / "script.py")
    arguments, directory, variables, first_path = json.loads(told)
    assert (arguments, directory, first_path) == ([script, "3", "b"], str(tmp_path), str(tmp_path))
    assert variables == {"SOME": "thing"}
    assert last == "at exit"


ENDS = """
import atexit, sys, threading
atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread's last"))).start()
sys.exit("in words")
"""


def test_a_program_ends_in_order_with_words(tmp_path: Path) -> None:
    assert started(tmp_path, ENDS).wait() == 1
    assert (tmp_path / "said").read_text() == "in words\na thread's last\nat exit\n"


def test_a_program_that_starts_ray_has_its_workers_forked(tmp_path: Path) -> None:
    text = """
from ray._private.parameter import RayParams
from ray._private.services import start_api_server
params = RayParams()
params.update_if_absent(setup_worker_path="Ray's own", include_log_monitor=True)
print(params.setup_worker_path, params.include_log_monitor, params.no_monitor)
print(start_api_server(False, raise_on_failure=False))
"""
    assert started(tmp_path, text).wait() == 0
    assert (tmp_path / "said").read_text() == f"{ray_forks.__file__} False True\n(None, None)\n"


TELLS_RAYS = """
import sys
was_there = "ray" in sys.modules
from ray._private.ray_constants import NUM_REDIS_GET_RETRIES as of_python
from ray._raylet import AuthenticationMode, Config, get_authentication_mode
print(was_there, of_python, Config.py_gcs_connect_timeout_s(), get_authentication_mode() == AuthenticationMode.TOKEN)
"""


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "True 20 30 False"),
        ({"RAY_py_gcs_connect_timeout_s": "7", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x" * 64}, "True 20 7 True"),
        ({"RAY_NUM_REDIS_GET_RETRIES": "7"}, "False 7 30 False"),
    ],
)
def test_a_program_that_uses_ray_has_its_own_settings(tmp_path: Path, variables: dict[str, str], told: str) -> None:
    """The server has loaded Ray with others."""
    assert started(tmp_path, TELLS_RAYS, **variables).wait() == 0
    assert (tmp_path / "said").read_text() == f"{told}\n"


def test_an_error_is_told_as_by_python_itself(tmp_path: Path) -> None:
    assert started(tmp_path, "def go():\n    raise ValueError('on purpose')\n\ngo()\n").wait() == 1
    said = (tmp_path / "said").read_text()
    assert said.startswith(f'Traceback (most recent call last):\n  File "{tmp_path / "script.py"}", line 4')
    assert said.endswith("ValueError: on purpose\n")


def test_a_program_is_found_by_its_environment_and_hears_signals(waiting: Program, tmp_path: Path) -> None:
    assert psutil.Process(waiting.pid).environ() == {"PACELINE_TEST_TAG": "found"}
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=0.01)
    os.killpg(waiting.pid, signal.SIGINT)
    assert waiting.wait() == -signal.SIGINT
    assert (tmp_path / "said").read_text().endswith("KeyboardInterrupt\n")


def test_a_killed_program_is_told_so(waiting: Program) -> None:
    waiting.kill()
    assert waiting.wait() == -signal.SIGKILL


@pytest.mark.parametrize("told", [b"", b"\0\0\0\3{"])
def test_who_ends_before_it_has_asked_harms_nobody(tmp_path: Path, told: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as asker, open(os.devnull) as nothing:
        asker.connect(os.environ[ADDRESS])
        if told:
            socket.send_fds(asker, [told], [nothing.fileno()] * 3)
    assert started(tmp_path, TELLS, "0").wait() == 0


def test_a_signal_reaches_no_program_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another process's by then."""
    program = started(tmp_path, TELLS, "0")
    assert wait_until(program._has_news)
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail(f"signal {number} to process {pid}"))
    program.kill()
    assert program.wait() == 0


def test_programs_end_with_their_server(tmp_path: Path) -> None:
    """Also those whose asker lives on."""
    (tmp_path / "script.py").write_text(WAITS)
    ask = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.programs import Program, served\n"
        "script, begun = sys.argv[1:]\n"
        "with served():\n"
        "    program = Program([script, begun], directory='.', environment={}, streams=(0, 1, 2))\n"
        "    while not Path(begun).exists():\n"
        "        time.sleep(0.01)\n"
        "print(program.pid)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", ask, str(tmp_path / "script.py"), str(tmp_path / "begun")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        pid = int(asker.stdout.readline())
        assert wait_until(lambda: not psutil.pid_exists(pid))
        assert asker.poll() is None
        asker.communicate("\n")


@pytest.mark.usefixtures("forked_programs")
def test_a_module_on_a_path_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "told.py").write_text("SAID = 'found'\n")
    (tmp_path / "module.py").write_text("import sys, told\nprint(__name__, told.SAID, sys.argv[1:])\n")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "folder")}
    command = ["python", "-m", "module", "a b"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ found ['a b']\n"


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_who_ends_a_stand_in_ends_its_program(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text("import os\nprint(os.getpid(), flush=True)\n" + "import time\ntime.sleep(600)")
    with subprocess.Popen(["python", "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as stand_in:
        assert stand_in.stdout is not None
        pid = int(stand_in.stdout.readline())
        assert pid != stand_in.pid
        stand_in.send_signal(number)
        assert stand_in.wait() == -number
        assert wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stand_in_passes_on_what_came_while_its_program_began(tmp_path: Path, number: signal.Signals) -> None:
    """The test is the server here."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "socket"))
        door.listen()
        command = [sys.executable, "-S", "-E", programs.__file__, "script.py"]
        with subprocess.Popen(command, env={ADDRESS: str(tmp_path / "socket")}) as stand_in:
            asker, _ = door.accept()
            stand_in.send_signal(number)
            with asker, subprocess.Popen(["sleep", "30"], preexec_fn=hears_interrupts) as program:
                asker.sendall(program.pid.to_bytes(4, "big"))
                status = program.wait()
                asker.sendall(status.to_bytes(4, "big", signed=True))
                assert status == stand_in.wait() == -number


def hears_interrupts() -> None:
    """As what is started in the background of a shell does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.timeout(1800)  # tests with a network of their own take turns
def test_a_program_is_on_its_askers_host(hosts: Network, tmp_path: Path) -> None:
    host = hosts.hosts[0]
    (tmp_path / "script.py").write_text("import os, socket\nprint(os.sched_getaffinity(0), socket.if_nameindex())\n")
    here = os.path.join(os.path.dirname(__file__), "..", "programs.py")
    python = ["/usr/bin/env", "python3", here, str(tmp_path / "script.py")]
    assert hosts.run(host, python, timeout_s=600).split(" ", 1)[0] == f"{{{host.core}}}"
    assert "eth0" in hosts.run(host, python, timeout_s=600)
