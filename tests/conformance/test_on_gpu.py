"""The conformance checks over the virtual engine, whose workers share a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conformance import rows, virtual_engine
from tests.conformance.rows import launched
from tests.conformance.test_conformance import *  # noqa: F403
from tests.conformance.test_evaluation import *  # noqa: F403
from tests.conformance.test_resume import *  # noqa: F403

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(virtual_engine.run, device="cuda")
    monkeypatch.setattr(rows, "local_engine", SimpleNamespace(run=run, wait_until=virtual_engine.wait_until))


NINE = {"clients": 9, "fraction": 1.0}
PIECES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{
        f"aggregate {name}": ("fed-avg", {**NINE, "aggregate": name}, ("gauss:workers=1",))
        for name in (
            "median",
            "trimmed-mean:byzantine=1",
            "krum:byzantine=1",
            "multi-krum:byzantine=1",
            "bulyan:byzantine=1",
            "geometric-median",
            "centered-clipping:radius=1",
            "fl-trust",
            "fools-gold",
            "nearest:byzantine=1",
            "clip:norm=1",
        )
    },
    **{
        f"attack {name}": ("fed-avg", NINE, (f"{name}:workers=1",))
        for name in ("sign-flip", "alie", "ipm", "min-max", "min-sum", "model-replacement")
    },
    **{
        f"attack {name} on steps": (name, {}, ("sign-flip:workers=1",))
        for name in ("all-reduce", "ps-bsp", "local-sgd")
    },
    **{name: (name, NINE, ()) for name in ("fed-prox", "fed-yogi", "fed-adam", "scaffold", "fed-nova", "fed-rep")},
    "noise of the server": ("dp-fed-avg", {"clients": 9, "fraction": 0.5}, ()),
    "noise of clients": ("fed-avg", {**NINE, "privacy": "local:noise=0.1:clip=0.5"}, ()),
    "masks": ("fed-avg", {**NINE, "secure": "masks"}, ()),
    "codec of clients": ("fed-avg", {**NINE, "codec": "top-k:ratio=0.2", "optimizer": "kept"}, ()),
    "slow momentum": ("local-sgd", {"every": 3, "outer": "nesterov"}, ()),
    "asynchronous rounds": ("fed-buff", {"clients": 9, "fraction": 0.5, "sampler.at_once": "0.3"}, ()),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_give_what_they_give_on_cores(name: str, tmp_path: Path) -> None:
    strategy, options, attacks = PIECES[name]

    def state_on(device: str) -> dict[str, torch.Tensor]:
        out = tmp_path / device
        settings = {"strategy": strategy, "workers": 3, "options": options, "attacks": attacks, "max_steps": 6}
        script = partial(launched, partial(rows.train, num_epochs=40), out, turns=2)
        return virtual_engine.run(script, out=out, device=device, **settings).model_state()

    for expected, found in zip(state_on("cpu").values(), state_on("cuda").values(), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)
