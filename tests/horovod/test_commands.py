"""Jobs of the launcher's whose processes are any commands, and what becomes of their steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.horovod import commands
from paceline.running.result import Result

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
SLEEP = 'python -c "import time; time.sleep(600)" & echo pid $!; wait'


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "legacy.py").write_text(MODULE)
    command = [PACELINE, "horovodrun", "-np", "2", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)


@pytest.mark.slow
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
    launcher.wait(60)
    until_s = time.monotonic() + 60
    while process.exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not process.exists()
    launcher.stdout.close()


def test_an_installed_horovod_is_found_past_the_stand_in(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("whose = 'its own'")
    path = [str(commands.STAND_IN), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    text = "import horovod, sys; print(horovod.whose, [each for each in sys.path if 'stand_in' in each])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "its own []\n"
