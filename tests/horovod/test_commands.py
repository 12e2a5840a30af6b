"""Jobs of the launcher's whose processes are any commands, and what becomes of their steps."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from paceline.cli.runs import state_of
from paceline.engines import requests
from paceline.engines.standing import Progress
from paceline.engines.world import alone
from paceline.errors import RunFailed, UsageError
from paceline.horovod import commands, reporting, runtime, worker_line
from paceline.horovod import line as lines
from paceline.records import EventRecord, NullReporter
from paceline.running.launched import LaunchedRun
from paceline.running.result import Result
from paceline.strategies.horovod import Horovod
from tests.distributed.harness import wait_until

PACELINE = str(Path(sys.executable).with_name("paceline"))
MODULE = """
import sys
import torch
import horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(12, 4)), batch_size=4)
for (x,) in data:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
print(f"rank {hvd.rank()} of {hvd.size()}: {sys.argv[1:]}")
"""
SLEEP = "(trap '' TERM; exec sleep 600) & echo pid $!; wait"
ABOUT = {"mark": "mark", "is_elastic": False, "is_recorded": True}


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "legacy.py").write_text(MODULE)
    command = ["paceline", "horovodrun", "-np", "2", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("elastic", [(), ("--min-num-proc", "1")])
def test_a_module_in_a_shell_s_text_exchanges_and_is_recorded(elastic: tuple[str, ...], tmp_path: Path) -> None:
    done = run(tmp_path, *elastic, "bash", "-c", 'echo begun; python -m legacy "$0" b', "a $HOME")
    assert done.returncode == 0, done.stderr
    assert "horovod is not installed: Paceline stands in for it" in done.stderr
    for rank in range(2):
        assert f"[{rank}]<stdout>:rank {rank} of 2: ['a $HOME', 'b']" in done.stdout
    (directory,) = (tmp_path / "runs").iterdir()
    result = Result.open(directory)
    assert result.manifest["strategy"]["name"] == "horovod"
    assert sorted((each.worker, each.iteration, each.samples) for each in result.steps) == [
        (rank, number, 4) for rank in range(2) for number in (1, 2, 3)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_command_that_fails_is_named_and_leaves_no_results(tmp_path: Path) -> None:
    done = run(tmp_path, "--no-alias", "python", "-m", "legacy")
    assert done.returncode == 1
    assert "No module named 'horovod'" in done.stderr
    assert "on localhost ended with status 1" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = run(tmp_path, "./nothing")
    assert done.returncode == 1
    assert "RunFailed: cannot run ./nothing: No such file or directory" in done.stderr


@pytest.mark.slow
def test_no_process_of_a_command_is_left_when_the_launcher_is_killed() -> None:
    command = [PACELINE, "horovodrun", "-np", "1", "sh", "-c", SLEEP]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert launcher.stdout is not None
    process = Path(f"/proc/{launcher.stdout.readline().split()[-1]}")
    assert process.exists()
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(300)
    until_s = time.monotonic() + 300
    while process.exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not process.exists()
    launcher.stdout.close()


def told_by() -> tuple[TextIO, int]:
    """A command's launcher: what it says is read from the one, and written to the other."""
    reading, writing = os.pipe()
    return os.fdopen(reading), writing


def end_once(path: Path, writing: int) -> None:
    """The launcher goes once the command has written something there."""
    until_s = time.monotonic() + 300
    while not (path.exists() and path.read_text()) and time.monotonic() < until_s:
        time.sleep(0.02)
    os.close(writing)


def test_what_does_not_hear_sigterm_ends_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LEAVE_WITHIN_S", 0.3)
    told, writing = told_by()
    path = tmp_path / "pid"
    threading.Thread(target=end_once, args=(path, writing)).start()
    text = f"(trap '' TERM; exec sleep 47) & sleep 0.1; echo $! > {path}; wait"
    assert commands.run_command(["bash", "-c", text], told, ABOUT, may_alias=False) == 128 + signal.SIGTERM
    stat = Path("/proc") / path.read_text().strip() / "stat"

    def has_ended() -> bool:
        try:
            return stat.read_text().split()[2] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    assert wait_until(has_ended, within_s=30)  # of 47


def test_what_hears_the_line_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LEAVE_WITHIN_S", 60.0)
    told, writing = told_by()
    path = tmp_path / "said"
    threading.Thread(target=end_once, args=(path, writing)).start()
    text = (
        "import json, os, sys, time; line = json.loads(os.environ['PACELINE_LAUNCHER_LINE']); "
        "open(sys.argv[1], 'w').write('begun'); os.fdopen(line['told']).read(); time.sleep(0.3); "
        "open(sys.argv[1], 'w').write('ended')"
    )
    assert commands.run_command([sys.executable, "-c", text, str(path)], told, ABOUT, may_alias=False) == 0
    assert path.read_text() == "ended"


def test_the_command_s_python_is_asked_for_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    told, writing = told_by()
    text = f'test "${{PYTHONPATH%%:*}}" = "{commands.STAND_IN}"'
    assert commands.run_command(["sh", "-c", text], told, ABOUT, may_alias=True) == 0
    os.close(writing)


def test_files_of_the_script_are_not_taken_for_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, output = os.pipe()
    for name, value in worker_line.variable(ABOUT, told=told, output=output).items():
        monkeypatch.setenv(name, value)
    os.close(told)
    os.close(output)
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context((tmp_path / str(number)).open("w+")) for number in range(6)]
        assert {told, output} <= {file.fileno() for file in files}
        with pytest.raises(UsageError, match="start it with close_fds=False, or by a shell"):
            worker_line.connect()
        for file in files:
            os.fstat(file.fileno())
    assert worker_line.connect() is None  # it is said once


def test_records_leave_within_a_quarter_of_a_second_though_nothing_follows() -> None:
    said: queue.Queue[list[Any]] = queue.Queue()
    line = SimpleNamespace(say=lambda kind, records: said.put(records))
    reporter = reporting.LineReporter(line)
    for number in (1, 2):
        reporter.emit(EventRecord("training", "run", number, 0.0, {}))
    time.sleep(0.01)
    found: list[Any] = []
    while len(found) < 2:
        found += said.get(timeout=60)
    assert [record[3] for record in found] == [1, 2]
    reporter.emit(EventRecord("training", "run", 3, 0.0, {}))
    line.before_end()
    assert said.get_nowait()[0][3] == 3


LEAVES = """
import os, sys
from paceline.horovod.line import PipeLine
line = PipeLine(os.fdopen(os.dup(0)), os.dup(1), "mark")
line.before_end = lambda: line.say("records", records=[])
print("begun", flush=True)
import time
time.sleep(60)
"""


def test_a_process_says_its_last_before_the_line_ends_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", LEAVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.stdin.close()
    assert "records" in process.stdout.read()
    assert process.wait(300) == -signal.SIGTERM
    process.stdout.close()


@pytest.mark.parametrize(
    ("error", "state"), [(None, "ended"), (RunFailed("rank 1"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_a_job_is_under_way_and_then_as_it_ended(
    error: BaseException | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = LaunchedRun("train.py", [], strategy=Horovod(), num_workers=2)
    with contextlib.suppress(RunFailed, KeyboardInterrupt), recorded:
        recorded.note(EventRecord("reformed", "run", 3, 0.5, {"ranks": [0]}))  # which alone makes no directory
        assert recorded.result is None
        recorded.keep(1, [["events", "training", "run", 7, 1.5, {}]])
        assert recorded.result is not None
        assert state_of(recorded.result) == "under way"
        asked = requests.ask(recorded.result.directory, {"do": "progress"})
        assert Progress.from_json(asked).iteration == 0
        with pytest.raises(UsageError, match="ended by Ctrl-C in its launcher's terminal"):
            requests.ask(recorded.result.directory, {"do": "stop"})
        if error is not None:
            raise error
    assert recorded.result is not None
    assert state_of(recorded.result) == state
    assert [event.name for event in recorded.result.events] == ["reformed", "training", state]


def test_a_recorded_world_is_another() -> None:
    met = alone()
    reporting.report_over(SimpleNamespace())
    try:
        recorded = runtime._recorded(met)
    finally:
        reporting._reporter = None
    assert recorded.strategy.traits.by_script
    assert not met.strategy.traits.by_script
    assert isinstance(met.reporter, NullReporter)


def test_an_installed_horovod_is_found_past_the_stand_in(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("whose = 'its own'")
    path = [str(commands.STAND_IN), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    text = "import sys; sys.modules['paceline'] = None; import horovod; "  # whoever has the one need not have the other
    text += "print(horovod.whose, [each for each in sys.path if 'stand_in' in each])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "its own []\n"
