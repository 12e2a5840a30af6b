"""Scripts that a hunt has found: each does what one process does, or ends at once and says why not.

A new kind of script is one new row here and one in `odd_hunted.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.errors import RunFailed
from tests.conformance import local_engine, odd_hunted, virtual_engine
from tests.conformance.reference import train_alone
from tests.conformance.scripts import BATCH_SIZE, EXACT, assert_close, launched, samples

SERVERS, JOINT = ("ps-bsp", "ps-ssp", "ps-asp"), ("all-reduce", "ps-bsp")
ALONE = ("gossip", "local-sgd")
STRATEGIES: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "ps-bsp": {},
    "ps-ssp": {},
    "ps-asp": {},
    "gossip": {"own_scores": False},
    "local-sgd": {"every": 3},
}
SOON_S = 30.0

EVERYWHERE = tuple(STRATEGIES)
DRIFT = r"after step \d+ parameter '.*' is not the same on all ranks: on rank 1 .*Make the same change on every rank"
IN_PLACE = r"step \d: the script changed parameters in place on rank \d, but the servers own them.*or use all-reduce"
MOVED = r"step \d: parameter '1.weight' was moved or replaced after prepare on rank \d.*before prepare"
NO_GRADIENT = r"parameter '1\.weight' has no gradient on rank \d.*or use all-reduce"
STATE = r"rank \d: the script changes or reads optimizer.state, which the servers hold; .*or use all-reduce"
ATTRIBUTE = r"servers cannot build Damped from its own settings: its attribute 'damping' is 0.25 .*or use all-reduce"
TWO_PASSES = r"rank \d: the script goes on with a pass over the loader after it has begun another.*two loaders by name"
FILTERS = r"rank \d, epoch 0: of 4 samples the DataLoader's collation gives \d in batch \d.*Subset"
TOGETHER = r"(leave out a batch or a step only where all do|every rank must step alike)"

REFUSED: Mapping[str, Mapping[tuple[str, ...], str]] = {
    "initialised anew": {("all-reduce",): DRIFT, SERVERS: IN_PLACE},
    "to other numbers and back": {("all-reduce",): DRIFT, (*SERVERS, "gossip"): MOVED},
    "parametrised late": {SERVERS: NO_GRADIENT},
    "small weights to zero": {SERVERS: IN_PLACE},
    "another optimizer": {EVERYWHERE: r"SGD steps the parameter '1\.weight' .*give prepare every optimizer, by name"},
    "state forgotten": {SERVERS: STATE},
    "state cleared": {SERVERS: STATE},
    "a parameter dropped": {SERVERS: r"the optimizer has no parameter '3\.bias' any more.*or use all-reduce"},
    "a group added": {EVERYWHERE: r"the optimizer trains parameter that is not of the model.*before prepare"},
    "step wrapped before": {SERVERS: r"another function in the place of SGD\.step.*or use all-reduce"},
    "an attribute of the optimizer": {SERVERS: ATTRIBUTE},
    "an attribute of the optimizer, after": {SERVERS: ATTRIBUTE},
    "zeroed before the step": {SERVERS: NO_GRADIENT},
    "a layer left out": {SERVERS: NO_GRADIENT},
    "two passes at once": {EVERYWHERE: TWO_PASSES},
    "a pass within a pass": {EVERYWHERE: TWO_PASSES},
    "split already": {EVERYWHERE: r"already has a DistributedSampler; prepare divides the data itself: remove it"},
    "collation that filters": {(*JOINT, *ALONE): FILTERS},
    "ends alone": {(*JOINT, *ALONE): TOGETHER},
}
RANDOM = ("initialised anew",)
"""What these draw is each rank's own."""
QUICK = (
    "state forgotten",
    "a parameter dropped",
    "step wrapped before",
    "two passes at once",
    "collation that filters",
)
ENGINES = {"virtual": virtual_engine, "processes": local_engine}


def refusal(name: str, strategy: str) -> str | None:
    return next((says for where, says in REFUSED.get(name, {}).items() if strategy in where), None)


def cases() -> list[Any]:
    return [
        pytest.param(
            engine,
            strategy,
            name,
            id=f"{engine}-{strategy}-{name}",
            marks=[] if (engine, strategy) == ("virtual", "ps-bsp") and name in QUICK else [pytest.mark.slow],
        )
        for engine in ENGINES
        for strategy in (STRATEGIES if engine == "virtual" else ("all-reduce", "ps-bsp", "gossip"))
        for name in odd_hunted.SCRIPTS
    ]


@pytest.mark.parametrize(("engine", "strategy", "name"), cases())
def test_hunted_scripts(engine: str, strategy: str, name: str, tmp_path: Path) -> None:
    script, says = odd_hunted.SCRIPTS[name], refusal(name, strategy)
    settings: dict[str, Any] = {"strategy": strategy, "options": STRATEGIES[strategy]}
    run = partial(ENGINES[engine].run, partial(launched, script), **settings)
    if says is not None:
        began_s = time.monotonic()
        with pytest.raises(RunFailed, match=f"(?s){says}"):
            run(workers=2, out=tmp_path)
        assert time.monotonic() - began_s < SOON_S
        return
    result = run(workers=2, out=tmp_path / "two")
    assert all(tensor.isfinite().all() for tensor in result.model_state().values())
    if strategy in JOINT:
        assert_close(result.model_state(), train_alone(script, 2), EXACT)
    elif name not in RANDOM:
        alone = run(workers=1, out=tmp_path / "one")
        assert_close(alone.model_state(), train_alone(script, 1), EXACT)


def in_pairs(items: list[Any]) -> list[Tensor]:
    """A row of each two samples; of an odd number the last is alone."""
    pairs = [items[start : start + 2] for start in range(0, len(items), 2)]
    return [torch.stack([pair[-1][place] for pair in pairs]) for place in range(3)]


def test_a_collation_that_makes_a_row_of_each_pair_leaves_nothing_out(tmp_path: Path) -> None:
    def loader(worker: Any) -> DataLoader[Any]:
        return DataLoader(samples(30), batch_size=BATCH_SIZE, collate_fn=in_pairs)

    script = partial(launched, partial(odd_hunted.train, loader=loader))
    assert virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path).iteration == 8
