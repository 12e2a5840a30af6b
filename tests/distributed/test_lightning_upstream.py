"""Lightning's own tests, of a checkout whose path PACELINE_LIGHTNING has, over the backend and with the strategy for
its Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("PACELINE_LIGHTNING")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed (paceline[frameworks])"),
    pytest.mark.skipif(CHECKOUT is None, reason="PACELINE_LIGHTNING is not set: the path of a checkout of Lightning's"),
]
BACKEND = """
from lightning.pytorch.strategies import DDPStrategy

own = DDPStrategy.__init__


def init(self, *given, **named):
    own(self, *given, **{"process_group_backend": "paceline", **named})
    print("over", self.process_group_backend)


DDPStrategy.__init__ = init
"""
STRATEGY = """
from lightning.pytorch import strategies
from paceline.lightning import PacelineStrategy


class Alone(PacelineStrategy):
    def __init__(self, device):
        super().__init__()
        print("under", self._worker.strategy)


strategies.SingleDeviceStrategy = Alone
"""
RESTORING = "test_custom_strategy.py::test_strategy_lightning_restore_optimizer_and_schedulers"


@pytest.mark.parametrize(
    ("test", "plugin", "says"),
    [
        ("test_ddp_integration.py::test_ddp_cpu", BACKEND, "over paceline"),
        ("test_registry.py::test_custom_registered_strategy_to_strategy_flag", BACKEND, "over paceline"),
        (f"{RESTORING}[True]", STRATEGY, "under Single("),
        (f"{RESTORING}[False]", STRATEGY, "under Single("),
    ],
)
def test_lightnings_own_tests_pass(test: str, plugin: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "changed.py").write_text(plugin)
    tests = Path(str(CHECKOUT)).resolve() / "tests"
    path = os.pathsep.join([str(tmp_path), str(tests), os.getcwd()])
    plain = ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "-q", "-s", "-p", "changed"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, f"tests_pytorch/strategies/{test}"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tests,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert says in done.stdout
