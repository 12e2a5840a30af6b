"""The key-value store with servers in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from paceline import kv
from paceline.errors import UsageError
from paceline.kv import serving
from tests.distributed.harness import wait_until
from tests.forks import FORKS

PAGE = Path(__file__).parents[2] / "docs" / "kv.md"


@pytest.mark.slow
def test_the_pages_example(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    assert example.count("\n") < 40
    (tmp_path / "means.py").write_text(example)
    done = subprocess.run([sys.executable, "means.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"worker \d: \[([^]]*)\], ", done.stdout)
    assert len(found) == 2
    for values in found:
        assert [float(value) for value in values.split(", ")] == pytest.approx([0.5, 1.5, 2.5], abs=1e-4)


@pytest.mark.slow
def test_servers_end_with_whoever_started_them(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(
        "import time\nfrom paceline import kv\n"
        "if __name__ == '__main__':\n"
        "    with kv.serve(kv.Spec(servers=2, workers=1)) as group:\n"
        "        print('served', flush=True)\n        time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "starts.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "served\n"
        children = psutil.Process(starter.pid).children(recursive=True)
        assert len(children) >= 2
        starter.kill()
        starter.wait()
        assert not psutil.wait_procs(children, timeout=300)[1]


@pytest.mark.slow
def test_a_function_that_servers_cannot_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "multiprocessing", SimpleNamespace(get_context=lambda way: FORKS))
    functions = {"f": kv.Function("no_such_module:f")}
    with (
        pytest.raises(UsageError, match="server 0 of a store: servers cannot import 'no_such_module:f'"),
        kv.serve(kv.Spec(servers=1, workers=1, functions=functions)),
    ):
        pass


def hang(rows: torch.Tensor, pushed: torch.Tensor) -> None:
    Path(os.environ["PACELINE_TEST_HANGS"]).touch()
    time.sleep(1000)


@pytest.mark.slow
def test_a_server_whose_function_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_END_S", 0.5)
    monkeypatch.setenv("PACELINE_TEST_HANGS", str(tmp_path / "hangs"))
    spec = kv.Spec(servers=1, workers=1, functions={"hang": kv.Function("tests.distributed.test_kv:hang")})
    with kv.serve(spec) as group:
        store = group.connect(0)
        store.push([1], torch.ones(1), function="hang")
        store.close(waits=False)
        assert wait_until((tmp_path / "hangs").exists)
        began_s = time.monotonic()
    assert 0.4 < time.monotonic() - began_s < 300
