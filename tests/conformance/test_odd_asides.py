"""Scripts whose oddity lies beside their steps: see `odd_asides.py`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RunFailed
from tests.conformance import local_engine, odd_asides, virtual_engine
from tests.conformance.odd_judging import EVERYWHERE, FAMILIES, JOINT, SAME_STEP, SERVERS, STRATEGIES, judge
from tests.conformance.reference import train_alone
from tests.conformance.scripts import BATCH_SIZE, EXACT, assert_close, launched, samples
from tests.covering import covering, left_to

SETTING = r"the script sets collate_fn of the loader that prepare returned.*set it before prepare"
REFUSED: Mapping[str, Mapping[tuple[str, ...], str]] = {
    "collated otherwise": {EVERYWHERE: SETTING},
    "collated otherwise, later": {EVERYWHERE: SETTING},
    "an order of its class": {EVERYWHERE: r"FirstOnly iterates in a way of its own; use a plain DataLoader"},
    "expanded": {EVERYWHERE: r"elements of 'ones', of shape \[4\], share memory.*clone\(\)"},
    "scaled together": {(*SERVERS[1:], "gossip", "local-sgd"): SAME_STEP.replace("all_gather", "all_reduce")},
}
QUICK = ("all-reduce", "ps-asp")


def refusal(strategy: str, name: str) -> str | None:
    return next((says for where, says in REFUSED.get(name, {}).items() if strategy in where), None)


def cases(names: Any) -> list[Any]:
    """Of each family of strategies one, and the quick ones."""
    return [
        pytest.param(strategy, name, marks=left_to(is_quick=strategy in QUICK, is_chosen=is_chosen))
        for strategy, name, is_chosen in covering(names, FAMILIES, refusal)
    ]


@pytest.mark.parametrize(("strategy", "name"), cases(odd_asides.SCRIPTS))
def test_scripts_with_asides(strategy: str, name: str, tmp_path: Path) -> None:
    judge(odd_asides.SCRIPTS[name], "virtual", strategy, refusal(strategy, name), tmp_path, is_compared=True)


OF_EVALUATIONS = {
    "reads the prepared loader": r"rank 0: the evaluation reads the loader 'loader' .*a DataLoader of its own",
    "asks others": r"rank 0: all_reduce in the evaluation, which runs on this rank alone.*worker\.meeting",
    "adapts": r"rank 0: the evaluation calls backward\(\) on the model itself.*copy\.deepcopy\(model\)",
}


@pytest.mark.parametrize(("strategy", "name"), cases(odd_asides.EVALUATIONS))
def test_evaluations_ask_nobody(strategy: str, name: str, tmp_path: Path) -> None:
    script = odd_asides.EVALUATIONS[name]
    run = partial(virtual_engine.run, partial(launched, script), strategy=strategy, workers=2, out=tmp_path)
    settings: dict[str, Any] = {"options": STRATEGIES[strategy], "eval_every": "5"}
    if says := OF_EVALUATIONS.get(name):
        with pytest.raises(RunFailed, match=says):
            run(**settings)
        return
    result = run(**settings)
    if strategy in JOINT:
        assert_close(result.model_state(), train_alone(script, 2), EXACT)


@pytest.mark.parametrize("way", [odd_asides.Anew, odd_asides.anew])
def test_a_script_that_asks_for_batches_one_by_one_ends_with_the_run(way: Any, tmp_path: Path) -> None:
    script = partial(launched, partial(odd_asides.by_next, way=way))
    with pytest.warns(UserWarning, match="the run has ended; the script ends here"):
        result = virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path, max_steps=10)
    assert result.iteration == 10


def test_what_a_loader_has_besides_is_the_scripts(tmp_path: Path) -> None:
    found: list[int] = []

    def script(worker: Any) -> Any:
        own = odd_asides.Counted(samples(), batch_size=BATCH_SIZE)
        model = odd_asides.train(worker, loader=lambda _: own, passed=odd_asides.count)
        found.append(own.epoch)
        return model

    virtual_engine.run(partial(launched, script), strategy="all-reduce", workers=2, out=tmp_path)
    assert found == [2, 2]


def ends_too_early(worker: Any) -> None:
    odd_asides.by_next(worker, way=iter)


def test_next_has_its_own_words_before_the_end(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="StopIteration"):
        virtual_engine.run(partial(launched, ends_too_early), strategy="all-reduce", workers=2, out=tmp_path)  # type: ignore[arg-type]


OWN_TENSOR = r"a tensor of shape \[.*\] that the loss depends on.*not the same on ranks 0 and 1.*worker\.all_reduce"


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
@pytest.mark.parametrize("script", [odd_asides.scaled, partial(odd_asides.beside_own_model, says_so=False)])
def test_tensors_that_each_worker_has_otherwise_are_told(strategy: str, script: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=OWN_TENSOR):
        virtual_engine.run(partial(launched, script), strategy=strategy, workers=2, out=tmp_path)


@pytest.mark.parametrize("strategy", ["all-reduce", pytest.param("gossip", marks=pytest.mark.slow)])
def test_they_are_not_told_where_the_script_says_so(strategy: str, tmp_path: Path) -> None:
    script = partial(launched, partial(odd_asides.beside_own_model, says_so=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        virtual_engine.run(script, strategy=strategy, workers=2, out=tmp_path)


def test_worker_log_takes_numbers(tmp_path: Path) -> None:
    def script(worker: Any) -> Any:
        return odd_asides.train(worker, stepped=lambda run: worker.log(loss="low"))

    with pytest.raises(RunFailed, match=r"worker\.log\(loss=\.\.\.\) takes a number, not str"):
        virtual_engine.run(partial(launched, script), strategy="all-reduce", workers=2, out=tmp_path)


def calls_alone(worker: Any) -> Any:
    def look(run: Any) -> None:
        if run.number == 5 and worker.rank == 0:
            worker.barrier()

    return odd_asides.train(worker, stepped=look)


@pytest.mark.slow
def test_who_calls_alone_is_not_waited_for_where_servers_wait(tmp_path: Path) -> None:
    """It would be, until the deadline."""
    run = partial(local_engine.run, partial(launched, calls_alone), strategy="ps-bsp", workers=2, out=tmp_path)
    with pytest.raises(RunFailed, match=r"rank 1 waits until all have pushed.*rank 0 waits for all in barrier"):
        run()
