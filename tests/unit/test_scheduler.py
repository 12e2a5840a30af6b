"""What a batch scheduler gives a job, and the script that asks for it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli import exit_codes
from paceline.engines.ray import slurm
from paceline.errors import UsageError
from paceline.scheduler import Allocation, Asked, Job, array_script, expand, from_environment, job_script
from tests.unit.test_cli import paceline

NAMES = st.text("abcxyz-", min_size=1, max_size=4).filter(lambda name: name[0] != "-")
NUMBERS = st.integers(0, 120)


@st.composite
def spans(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A span of numbers as SLURM writes it, and what it stands for."""
    width = draw(st.integers(1, 4))
    first = draw(NUMBERS)
    last = draw(st.integers(first, first + 12))
    numbers = [f"{number:0{width}d}" for number in range(first, last + 1)]
    if first == last or draw(st.booleans()):
        return numbers[0], numbers[:1]
    return f"{numbers[0]}-{numbers[-1]}", numbers


@st.composite
def hostlists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list of hosts in the short form and in the long one."""
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(NAMES)
        inside = draw(st.lists(spans(), max_size=3))
        if not inside:
            texts.append(name)
            hosts.append(name)
            continue
        texts.append(f"{name}[{','.join(text for text, _ in inside)}]")
        hosts += [name + number for _, numbers in inside for number in numbers]
    return ",".join(texts), hosts


@given(hostlists())
def test_short_lists_stand_for_long_ones(case: tuple[str, list[str]]) -> None:
    text, hosts = case
    assert expand(text) == hosts


def test_several_brackets_multiply() -> None:
    assert expand("r[1-2]n[08-09]") == ["r1n08", "r1n09", "r2n08", "r2n09"]


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a[1-2", "a1-2]", "a[2-1]", "a[x]", "a[1-]", "a[]", "a[[1]]", "a[1-999999]"]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="list of hosts"):
        expand(text)


ENVIRONMENT = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),4",
    "SLURMD_NODENAME": "n1",
}


def test_slurms_variables_give_the_allocation() -> None:
    assert from_environment(ENVIRONMENT) == Allocation("7", ("n1", "n2", "n3"), (8, 8, 4))
    assert from_environment({**ENVIRONMENT, "SLURM_STEP_ID": "4294967290"}) is not None  # a shell that salloc gives


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7"}, {**ENVIRONMENT, "SLURM_STEP_ID": "0"}])
def test_elsewhere_there_is_none(environment: dict[str, str]) -> None:
    assert from_environment(environment) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURMD_NODENAME": "n2"}, "started on 'n1', the first host of job 7, and this is 'n2'"),
        ({"SLURMD_NODENAME": ""}, "this is none of its hosts"),
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x2)"}, "3 hosts, and SLURM_JOB_CPUS_PER_NODE tells of 2"),
        ({"SLURM_JOB_CPUS_PER_NODE": "many"}, "not as in"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        from_environment({**ENVIRONMENT, **changed})


ASKED = Asked("train", nodes=4, cores=8, gpus=0, options={"time": "01:00:00", "exclusive": ""})


def job(**changed: object) -> Job:
    settings: dict[str, object] = {
        "asked": ASKED,
        "command": ["paceline", "run", "my script.py", "--workers", "4", "--", "--name", "a b"],
        "directory": "runs/slurm",
        "checkpoint": "checkpoint.pt",
        "interrupted": exit_codes.INTERRUPTED,
    }
    return Job(**{**settings, **changed})  # type: ignore[arg-type]


def test_a_job_script_asks_for_what_it_was_given_and_is_bash() -> None:
    text = job_script(job())
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=4", "#SBATCH --cpus-per-task=8", "#SBATCH --time=01:00:00"} <= set(asked)
    assert "#SBATCH --exclusive" in asked
    assert not any("gpus" in line for line in asked)
    assert "#SBATCH --gpus-per-node=2" in job_script(job(asked=replace(ASKED, gpus=2)))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --no-kill" not in asked
    assert "#SBATCH --no-kill" in job_script(job(outlives_hosts=True)).splitlines()


@pytest.mark.parametrize(
    ("options", "log"),
    [(["--out", "my runs/one"], "'--output=my runs/one-%j.log'"), (["--compare"], "--output=studies/train-%A_%a.log")],
)
def test_a_job_script_that_is_written_is_submitted_with_a_log_whose_directory_is_there(
    options: list[str], log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import paceline\n\npaceline.init()\n", encoding="utf-8")
    more = ["--strategies", "all-reduce", "--target", "accuracy=0.9"] if "--compare" in options else []
    assert paceline(monkeypatch, "slurm", "train.py", *options, *more, "--write", "job.sh") == 0
    assert capsys.readouterr().out == f"Wrote job.sh; submit it with: sbatch {log} job.sh\n"
    assert Path("my runs" if not more else "studies").is_dir()


def test_each_task_of_an_array_is_given_its_number_before_the_scripts_arguments(tmp_path: Path) -> None:
    program = write_program(tmp_path / "paceline", f'printf "%s|" "$@" > {tmp_path}/given')
    text = array_script(ASKED, [str(program), "compare", "my script.py", "--", "--name", "a b"], num_tasks=12)
    assert "#SBATCH --array=1-12\n" in text
    task = {"SLURM_ARRAY_TASK_ID": "7", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash"], input=text, text=True, check=True, env=task)
    assert (tmp_path / "given").read_text() == "compare|--point|7|my script.py|--|--name|a b|"


def told(signal: str, *, on_term: str) -> str:
    """A run that SLURM's signal reaches by way of the job script, which sends it SIGTERM."""
    return f"trap '{on_term}' TERM; sleep 0.2; kill -{signal} $PPID; for _ in $(seq 99); do sleep 0.1; done; exit 9"


RUNS = {
    "done": ("sleep 0.1", 0, False),
    "failed": ("exit 1", 1, False),
    "interrupted, and nobody has said that the time is over": ("exit 130", 130, False),
    "told, and saved": (told("USR1", on_term="exit 130"), 130, True),
    "told at its last step": (told("USR1", on_term="exit 0"), 0, False),
    "told, and could not save": (told("USR1", on_term="exit 1"), 1, False),
    "cancelled": (told("TERM", on_term="exit 130"), 130, False),
    "told at its very end": ("trap '' TERM; sleep 0.2; kill -USR1 $PPID; exit 0", 0, False),
    "told as it failed": ("trap '' TERM; sleep 0.2; kill -USR1 $PPID; exit 1", 1, False),
}
"""What a stand-in for Paceline does; the status that the job is to end with, and whether it is to be queued again."""


def write_program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Of each, at once: the job script's status, what Paceline was given, and what scontrol was asked."""
    jobs = {}
    for name, (does, _, _) in RUNS.items():
        home = tmp_path_factory.mktemp("job")
        program = write_program(home / "paceline", f'echo "$@" >> {home}/given\n{does}')
        write_program(home / "scontrol", f'echo "$@" >> {home}/asked')
        (home / "asked").touch()
        (home / "job.sh").write_text(job_script(job(command=[str(program), "run", "train.py"], directory="r")))
        environment = {"PATH": f"{home}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
        jobs[name] = home, subprocess.Popen(["bash", "job.sh"], cwd=home, env=environment)
    return {
        name: (process.wait(600), (home / "given").read_text(), (home / "asked").read_text())
        for name, (home, process) in jobs.items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_job_ends_as_its_run_and_is_queued_again_if_the_run_was_interrupted_in_time(
    ended: dict[str, tuple[int, str, str]], name: str
) -> None:
    _, status, again = RUNS[name]
    assert ended[name] == (status, "run --out r-7 train.py\n", "requeue 7\n" if again else "")


@pytest.mark.parametrize(
    ("has_saved", "option"), [(True, "--resume {0}/r-7"), (False, "--out {0}/r-7")], ids=["saved", "not saved"]
)
def test_a_job_that_is_started_again_goes_on(tmp_path: Path, has_saved: bool, option: str) -> None:
    program = write_program(tmp_path / "paceline", f'echo "$@" > {tmp_path}/given')
    (tmp_path / "r-7").mkdir()
    if has_saved:
        (tmp_path / "r-7" / "checkpoint.pt").touch()
    text = job_script(job(command=[str(program), "run", "train.py"], directory=str(tmp_path / "r")))
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    subprocess.run(["bash", "-s"], input=text, text=True, env=environment, check=True, timeout=600)
    assert (tmp_path / "given").read_text() == f"run {option.format(tmp_path)} train.py\n"
    assert (tmp_path / "r-7").exists() == has_saved
    assert (tmp_path / "r-7-before-2").exists() != has_saved


def test_a_job_without_its_first_host_is_queued_again_until_slurm_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host is up at first. Then SLURM refuses twice, does not answer, and at last takes the job."""
    answers = f"""
        echo "$1" >> {tmp_path}/asked
        case "$1 $(wc -l < {tmp_path}/asked)" in
        "show 1") echo State=IDLE ;;
        show*) echo NodeAddr=n1 State=DOWN*+DRAIN ;;
        "requeue 3" | "requeue 5") echo not now >&2; exit 1 ;;
        "requeue 7") exec sleep 60 ;;
        esac"""
    write_program(tmp_path / "scontrol", answers)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm, "_LOOK_S", 0.01)
    monkeypatch.setattr(slurm, "_ANSWER_S", 3.0)  # in which a busy machine has started what answers
    slurm.queue_again_without_first_host(Event())
    assert (tmp_path / "asked").read_text().split() == ["show", *["show", "requeue"] * 4]
    assert capsys.readouterr().err.count("SLURM does not queue job 7 again: not now;") == 1
