"""What trainers and libraries of the field do: each script is honoured, told, or refused at once, as in
`test_odd_hunted.py`. A new kind of script is one new row here and one in `odd_copies.py`, `odd_trainers.py` or
`odd_kept.py`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import paceline
from tests.conformance import odd_copies, odd_kept, odd_trainers, virtual_engine
from tests.conformance.odd_hunted import train
from tests.conformance.odd_judging import (
    ALONE,
    DRIFT,
    EVERYWHERE,
    FAMILIES,
    IN_PLACE,
    JOINT,
    NO_GRADIENT,
    OWN_DIVISOR,
    SAME_STEP,
    SERVERS,
    TOGETHER,
    judge,
)
from tests.conformance.odd_trainers import Advancing
from tests.conformance.scripts import BATCH_SIZE, EXACT, assert_close, launched, samples
from tests.covering import covering, left_to

ANOTHER = r"SGD steps the parameter '\d\.\w+' of a prepared model.*give prepare every optimizer.*make it before"
REPLACED = r"parameter '.*' was moved or replaced after prepare on rank \d.*before prepare"
NEVER_STEPS = r"rank \d: the script changes the parameters batch after batch and never calls optimizer\.step\(\)"
IN_THREAD = r"nothing can be waited for in a thread that the script has started; call backward\(\)"
OWN_GRADIENT = r"the script has changed the mean gradient of '\d\.\w+' on rank 1 .*let backward\(\) compute it"
NO_BATCH = r"rank \d: the optimizer steps, and the script has taken no batch .*Loop over the prepared one"
REDUCED = SAME_STEP.replace("all_gather", "all_reduce")
ADDED = r"the optimizer trains parameter '4\.weight'.*before prepare"
OUTSIDE = r"parameter 4 of the optimizer's group 0 is not the model's; .*give prepare every module .*by name"
BOTH = r"'adam' and 'sgd' both hold the parameter '1\.weight'.*give it to one of them"
CAUGHT = r"rank \d: the loss is a sum over the batch \(NllLoss .*take the mean"
APART = r"(leave out a batch or a step only where all do|every rank must step alike|make the same calls)"
SCRIPTS = odd_copies.SCRIPTS | odd_trainers.SCRIPTS | odd_kept.SCRIPTS

REFUSED: Mapping[str, Mapping[tuple[str, ...], str]] = {
    "gradients in another graph": {("all-reduce", *SERVERS): r"modified by an inplace .*parameter\.grad\.clone\(\)"},
    "gradients shared": {("all-reduce", *SERVERS): r"has moved the gradient of '.*' into shared memory.*share a copy"},
    "gradients' data replaced": {("all-reduce", *SERVERS): r"was moved or .*let it set parameter\.grad itself"},
    "half the way back": {SERVERS: IN_PLACE},
    "parametrisation removed": {(*SERVERS, "gossip"): REPLACED},
    "stepped where small": {("gossip", "local-sgd"): TOGETHER},
    "a layer more": {EVERYWHERE: ADDED},
    "a bias less": {SERVERS: NO_GRADIENT.replace("1", "3").replace("weight", "bias")},
    "tied after": {SERVERS: NO_GRADIENT.replace("1", "3")},
    "layers left out": {SERVERS: NO_GRADIENT.replace("1", "layers.3")},
    "main gradients": {("all-reduce",): DRIFT, ("ps-bsp",): OWN_GRADIENT},
    "main gradients, clipped": {("all-reduce",): DRIFT, ("ps-bsp",): OWN_GRADIENT},
    "stepped in backward": {EVERYWHERE: ANOTHER},
    "master weights": {EVERYWHERE: NEVER_STEPS},
    "averaged by hand": {(*SERVERS[1:], *ALONE): REDUCED},
    "on a plateau": {(*SERVERS[1:], *ALONE): REDUCED},
    "another optimizer at once": {EVERYWHERE: ANOTHER},
    "indices of the sampler": {EVERYWHERE: NO_BATCH},
    "a sum, caught": {JOINT: CAUGHT},
    "a change, caught": {("all-reduce",): DRIFT, SERVERS: IN_PLACE},
    "a bad batch, caught": {(*JOINT, "gossip", "local-sgd"): APART},
    "pruned later, for good": {(*SERVERS, "gossip"): REPLACED},
    "frozen later": {SERVERS: NO_GRADIENT},
    "unfrozen later": {EVERYWHERE: ADDED.replace("4", "1")},
    "layers drawn by rank": {SERVERS: NO_GRADIENT.replace(r"1\.", r"aside\.")},
    "loss weights outside": {EVERYWHERE: OUTSIDE},
    "one optimizer after the other": {EVERYWHERE: BOTH},
}
OWN = (
    "projected",
    "a layer's hook that clips",
    "those with labels",
    "memory by index",
    "layers drawn by rank",
    "a sum, caught",
)
"""What docs/script.md says to be each worker's own."""
QUICK = (
    "a step of copies",
    "parametrisation removed",
    "tied after",
    "main gradients",
    "master weights",
    "gradients of before kept detached",
    "a sum, caught",
    "a change, caught",
)
IN_PROCESSES = (
    "whole objects saved",
    "a slow copy inside",
    "averaged by hand",
    "main gradients",
    "backward in a thread",
    "gradients kept",
    "gradients kept detached",
    "gradients' data kept",
    "a sum, caught",
)


def refusal(engine: str, strategy: str, name: str) -> str | None:
    if (engine, name) == ("virtual", "backward in a thread") and strategy in JOINT:
        return IN_THREAD
    return next((says for where, says in REFUSED.get(name, {}).items() if strategy in where), None)


def case(engine: str, strategy: str, name: str, is_chosen: bool) -> Any:
    is_told = name == "those with labels" and strategy in JOINT
    told = [pytest.mark.filterwarnings(f"ignore:{OWN_DIVISOR}")] if is_told else []
    is_quick = (engine, strategy) == ("virtual", "ps-bsp") and name in QUICK
    marks = [*told, *left_to(is_quick=is_quick, is_chosen=is_chosen)]
    return pytest.param(engine, strategy, name, id=f"{engine}-{strategy}-{name}", marks=marks)


def cases() -> list[Any]:
    """Virtually under a strategy of each family; in processes some scripts under a strategy for each outcome."""
    virtually, apart = (partial(refusal, engine) for engine in ("virtual", "processes"))
    return [
        *(case("virtual", *chosen) for chosen in covering(SCRIPTS, FAMILIES, virtually)),
        *(case("processes", *chosen) for chosen in covering(IN_PROCESSES, [JOINT], apart)),
    ]


@pytest.mark.parametrize(("engine", "strategy", "name"), cases())
@pytest.mark.filterwarnings("ignore:rank 0. the script sets the gradient of")
@pytest.mark.filterwarnings("ignore:after its last step the script changed parameter")
def test_scripts_of_trainers(engine: str, strategy: str, name: str, tmp_path: Path) -> None:
    says = refusal(engine, strategy, name)
    judge(SCRIPTS[name], engine, strategy, says, tmp_path, is_compared=name not in OWN)


class Kept(Advancing):
    """Tells where each of its passes began."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []

    def __iter__(self) -> Any:
        self.begun.append(self.cursor.start)
        return super().__iter__()


def test_a_sampler_goes_on_where_its_last_pass_ended(tmp_path: Path) -> None:
    begun: list[list[int]] = []
    seen: list[list[int]] = []

    def script() -> None:
        sampler, numbers = Kept(), []

        def way(batches: Any) -> Any:
            for batch in batches:
                numbers.extend(batch[2].tolist())
                yield batch

        loader: Any = DataLoader(samples(), batch_size=BATCH_SIZE, sampler=sampler)
        train(paceline.init(), loader=lambda worker: loader, way=way)
        begun.append(sampler.begun)
        seen.append(numbers)

    virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path)
    assert begun == [[0, 48], [0, 48]]
    assert sorted(seen[0] + seen[1]) == list(range(96))


def test_a_sampler_that_goes_on_is_where_it_was_after_a_resume(tmp_path: Path) -> None:
    def loader(worker: Any) -> DataLoader[Any]:
        return DataLoader(samples(), batch_size=BATCH_SIZE, sampler=Advancing())

    run = partial(
        virtual_engine.run, partial(launched, partial(train, loader=loader)), strategy="all-reduce", workers=2
    )
    whole = run(out=tmp_path / "whole")
    run(out=tmp_path / "one", max_steps=8)
    resumed = run(out=tmp_path / "two", resume=tmp_path / "one")
    assert_close(resumed.model_state(), whole.model_state(), EXACT)
