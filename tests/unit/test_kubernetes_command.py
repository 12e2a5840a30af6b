"""`paceline kubernetes` on the command line: the file that it writes, what it says, and what it refuses."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from paceline.errors import UsageError
from paceline.scheduler.script_alone import require_alone
from tests.unit.test_cli import paceline

SCRIPT = "import paceline\n\nworker = paceline.init()\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_the_command_writes_a_file_and_says_how_to_submit_it(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["--image", "i", "--name", "t", "--nodes", "3", "--gpus", "2", "--output", "j.yaml"]
    options = ["--strategy", "ps-asp:servers=2", "--max-steps", "9"]
    assert paceline(monkeypatch, "kubernetes", script, *ask, *options, "--", "--lr", "0.1 $x") == 0
    assert capsys.readouterr().out == "Wrote j.yaml; submit it with: kubectl apply --server-side -f j.yaml\n"
    config, made = yaml.safe_load_all(Path("j.yaml").read_text(encoding="utf-8"))
    assert config["data"] == {"script.py": SCRIPT}
    command = shlex.split(made["spec"]["entrypoint"].replace("$$", "$"))
    run = ["paceline", "run", "/paceline/script/my train.py", "--workers", "6", "--out", "/paceline/results/t"]
    assert command == [*run, *options, "--", "--lr", "0.1 $x"]
    head = made["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    items = next(volume["configMap"]["items"] for volume in head["volumes"] if volume["name"] == "script")
    assert items == [{"key": "script.py", "path": "my train.py"}]


@pytest.mark.parametrize(
    ("resume", "out"),
    [("/paceline/results/before", ""), ("s3://bucket/run", " --out /paceline/results/train")],
)
def test_a_script_in_the_image_is_not_read_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], resume: str, out: str
) -> None:
    options = ["--image", "i", "--script-in-image", "--resume", resume, "--results-claim", "r"]
    assert paceline(monkeypatch, "kubernetes", "/app/train.py", *options) == 0
    captured = capsys.readouterr()
    (made,) = yaml.safe_load_all(captured.out)
    assert made["spec"]["entrypoint"] == f"paceline run /app/train.py --workers 1{out} --resume {resume}"
    assert captured.err == "Submit it with: kubectl apply --server-side -f -\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--elastic", "2"], "--elastic '2' is not of the form MIN:MAX"),
        (["--elastic", "2:4", "--nodes", "6"], "--elastic 2:4 is for 2 to 4 workers"),
        (["--workers", "2", "--out", "x"], "--out is the job's own; leave it out"),
        (["--address", "a:1"], "--address is the job's own"),
        (["--strategy", "ps-asps"], "did you mean"),
        (["--name", "No"], "DNS-1035"),
        (["--script-in-image"], None),
        (["--nodes", "0"], "Invalid value for '--nodes'"),
        (["--max-step", "1"], "No such option"),
        (["--output", "/nonesuch/j.yaml"], "cannot write /nonesuch/j.yaml"),
    ],
)
def test_the_command_refuses(
    script: Path,
    options: list[str],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = script.name if said is None else script
    named = [] if "--name" in options else ["--name", "t"]
    assert paceline(monkeypatch, "kubernetes", given, "--image", "i", *named, *options) != 0
    captured = capsys.readouterr()
    assert (said or "must be the whole path in the image") in " ".join(captured.err.split())
    assert captured.out == ""


@pytest.mark.parametrize(
    ("beside", "line", "said"),
    [
        ("nets.py", "from nets import Net", "line 1 .* imports nets, which is the module nets.py"),
        ("nets/__init__.py", "if True:\n    import torch, nets.small as small", "line 2 .* is the package nets/"),
        ("nets/small.py", "def run():\n    import nets.small", "line 2 .* is the package nets/"),
        ("nets.py", "import torch", None),
        ("nets.py", "try:\n    import nets\nexcept ImportError:\n    nets = None", None),
        ("nets.py", "import typing\nif typing.TYPE_CHECKING:\n    import nets", None),
        ("torch/small.py", "import torch", None),  # the installed one is found
        ("train.py", "import train", None),  # itself
        ("nets.py", "this is no Python", None),
        ("nets.py", f"x = {'-' * 200_000}1", None),
        ("nets.py", f"import {'a' * 300}", None),
    ],
)
def test_a_script_with_modules_beside_it_is_not_sent_without_them(
    beside: str, line: str, said: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    (tmp_path / beside).write_text("")
    if said is None:
        require_alone(script, line)
        return
    with pytest.raises(UsageError, match=f"{said} beside it, and the job gets the script alone.*--script-in-image"):
        require_alone(script, line)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--nodes", "4", "--elastic", "2:6"], (2, 4, 6)),
        (["--nodes", "4", "--workers", "8", "--elastic", "3:11"], (2, 4, 6)),
        (["--nodes", "3", "--workers", "2", "--elastic", "1:2"], (1, 3, 3)),
        (["--nodes", "2"], (2, 2, 2)),
    ],
)
def test_bounds_of_workers_become_those_of_hosts(
    script: Path, options: list[str], expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = script.with_name("job.yaml")
    asked = ["--name", "train", "--image", "i", "--output", str(written)]
    assert paceline(monkeypatch, "kubernetes", str(script), *asked, *options) == 0
    _, made = yaml.safe_load_all(written.read_text())
    (group,) = made["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == expected
