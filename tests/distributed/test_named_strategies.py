"""Scripts in TensorFlow's words: Ctrl-C saves them, says how to go on, and leaves nothing; what goes on trains what one
process trains."""

from __future__ import annotations

import runpy
import signal
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from paceline import Result
from paceline.training.sharding import ShardedLoader
from tests.covering import stood_for
from tests.distributed.harness import SCRIPTS, num_steps, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_here")]
SCRIPT = SCRIPTS / "named.py"
NAMES = runpy.run_path(str(SCRIPT), run_name="named")
MORE_STEPS = 20


def one_process(num_steps: int) -> dict[str, torch.Tensor]:
    """A loop of PyTorch's alone, which takes the replicas' batches together."""
    model = NAMES["make_model"]()
    optimizer, data = NAMES["make_optimizer"](model), NAMES["make_data"]()
    batches = ShardedLoader(DataLoader(data, batch_size=NAMES["GLOBAL_BATCH"], shuffle=True), rank=0, size=1, seed=0)
    epoch = 0
    while num_steps:
        for batch in batches.batches(epoch)[:num_steps]:
            x, y = data[list(batch.samples)]
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            num_steps -= 1
        epoch += 1
    return model.state_dict()


ENOUGH = ("MirroredStrategy", "ParameterServerStrategy")
"""In lock step, and where each gradient is an update. Which strategy a name is, test_compat_strategies.py says."""


@pytest.mark.parametrize("name", [name if name in ENOUGH else stood_for(name) for name in NAMES["STRATEGIES"]])
def test_ctrl_c_and_going_on(name: str, start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = start(name, "--out", out, program=str(SCRIPT))
    assert wait_until(lambda: num_steps(out))
    command.interrupt()
    output = command.wait()
    saved = Result.open(out).iteration
    assert saved > 0
    (told,) = [line for line in output.splitlines() if line.startswith("interrupted")]
    assert f"saved at iteration {saved} in {out}" in told
    assert f"resume={str(out)!r}" in told
    assert "Traceback" not in output
    assert command.status == -signal.SIGINT, output  # as Python ends for a shell that waits
    command.assert_nothing_left()

    last, strategy = saved + MORE_STEPS, NAMES["STRATEGIES"][name]()
    result = strategy.run(NAMES["train"], (strategy, 0.0), out=out, resume=out, max_steps=last)
    assert result.iteration == last
    if name != "ParameterServerStrategy":  # there each gradient is an update
        torch.testing.assert_close(result.model_state(), one_process(last), rtol=1e-5, atol=1e-6)
