"""Scripts that say `import horovod.torch` where Horovod is not installed."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import paceline
from paceline.cli.job_hosts import default_strategy
from paceline.cli.jobs import require_a_run
from paceline.engines import aliases
from paceline.engines.scripting import read_script
from paceline.errors import UsageError
from paceline.running.result import Result
from paceline.seeding import derive, seed_everything

SCRIPT = """
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(5):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
weights = hvd.allgather(model.weight.detach())
print(f"rank {hvd.rank()} of {hvd.size()}, equal: {bool((weights == weights[0]).all())}")
"""


SEEDS = """
import torch
import horovod.torch as hvd

given = torch.randint(10**9, ())
torch.manual_seed(42)
hvd.init()
print(f"given {hvd.rank()} drew {given}")
print(f"seeded {hvd.rank()} drew {torch.randint(10**9, ())}")
"""


def test_a_script_that_mentions_it_gets_the_stand_in(tmp_path: Path) -> None:
    script = tmp_path / "legacy.py"
    script.write_text(SCRIPT)
    assert read_script(script, ()).aliases == ("horovod",)
    assert read_script(script, (), may_alias=False).aliases == ()
    script.write_text("print(1)")
    assert read_script(script, ()).aliases == ()


@pytest.mark.parametrize(
    ("source", "strategy"),
    [
        (SCRIPT, "horovod"),
        ("from horovod import torch as hvd", "horovod"),
        ("def main():\n    from paceline.horovod.torch import init, rank", "horovod"),
        ("import paceline\nimport horovod.torch as hvd", "all-reduce"),
        ("from paceline import init\nimport horovod.torch as hvd", "all-reduce"),
        ("import horovod\nhorovod.run(print)", "all-reduce"),
        ("import paceline  # and no longer horovod.torch", "all-reduce"),
        ("from . import torch", "all-reduce"),
    ],
)
def test_a_script_that_exchanges_by_itself_alone_is_horovod_s(tmp_path: Path, source: str, strategy: str) -> None:
    (tmp_path / "legacy.py").write_text(source)
    assert default_strategy(read_script(tmp_path / "legacy.py", ())) == strategy


def test_a_horovod_that_is_installed_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "legacy.py").write_text(SCRIPT)
    assert default_strategy(read_script(tmp_path / "legacy.py", (), may_alias=False)) == "all-reduce"


def test_who_asks_whose_script_it_is_hears_no_warnings(tmp_path: Path) -> None:
    (tmp_path / "legacy.py").write_text(f'pattern = "\\d"\n{SCRIPT}')
    with pytest.warns(Warning, match="invalid escape"):
        script = read_script(tmp_path / "legacy.py", ())
    with warnings.catch_warnings(action="error"):
        assert default_strategy(script) == "horovod"


def test_a_job_without_the_stand_in_has_the_other_default(tmp_path: Path) -> None:
    (tmp_path / "legacy.py").write_text(SCRIPT)
    rest = ["--option", "codec=fp16"]
    with pytest.raises(UsageError):
        require_a_run(tmp_path / "legacy.py", rest, jobs_own=())
    require_a_run(tmp_path / "legacy.py", [*rest, "--no-alias"], jobs_own=())


def test_a_simulated_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "legacy.py").write_text(SCRIPT)
    with pytest.raises(UsageError, match="run in real processes; use --engine ray"):
        paceline.run(
            tmp_path / "legacy.py", strategy="horovod", engine="virtual", cluster="lab-1gbe", out=tmp_path / "out"
        )


def test_modules_are_the_same_under_both_names() -> None:
    text = """
from paceline.engines import aliases
aliases.install(["horovod"])
import horovod, horovod.torch
import paceline.horovod.torch
import sys
assert sys.modules["horovod.torch"] is sys.modules["paceline.horovod.torch"]
assert horovod.torch.__name__ == horovod.torch.__spec__.name == "paceline.horovod.torch"
from horovod.torch import DistributedOptimizer
for name in ("horovod.tensorflow", "horovod.nothing"):
    try:
        __import__(name)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "horovod.tensorflow is not part of Paceline's Horovod: use TensorFlow's own" in done.stdout
    assert "No module named 'horovod.nothing'" in done.stdout


def test_an_installed_package_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    assert aliases.missing("import horovod") == ()
    aliases.install(["horovod"])
    assert sys.meta_path == before


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_an_unchanged_script_runs_on_ray(tmp_path: Path) -> None:
    script = tmp_path / "legacy.py"
    script.write_text(SCRIPT)
    command = ["paceline", "run", script, "--workers", "2", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "horovod is not installed: Paceline stands in for it" in done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2, equal: True" in done.stdout + done.stderr
    assert sorted((step.worker, step.step) for step in Result(tmp_path / "out").steps) == [
        (rank, number) for rank in range(2) for number in range(1, 6)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("given", [[], ["--strategy", "horovod"]])
def test_what_the_script_seeds_holds(tmp_path: Path, given: list[str]) -> None:
    """Ranks that seed alike before `init` draw alike; else each has numbers of its own, which follow --seed."""
    (tmp_path / "legacy.py").write_text(SEEDS)
    command = ["paceline", "run", tmp_path / "legacy.py", "--workers", "2", "--out", tmp_path / "out", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    drawn = dict(re.findall(r"(\w+ \d) drew (\d+)", done.stdout + done.stderr))
    assert drawn["seeded 0"] == drawn["seeded 1"]
    for rank in range(2):
        seed_everything(derive(0, "rank", rank))
        assert int(drawn[f"given {rank}"]) == torch.randint(10**9, ()).item()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_the_launcher_s_settings_reach_the_workers(tmp_path: Path) -> None:
    (tmp_path / "legacy.py").write_text(SCRIPT)
    command = ["paceline", "horovodrun", "-np", "2", "--timeline-filename", "timeline.json", "python", "legacy.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2, equal: True" in done.stdout + done.stderr
    assert "allreduce" in (tmp_path / "timeline.json").read_text().lower()
    (directory,) = (tmp_path / "runs").iterdir()
    assert len(Result(directory).steps) == 10
