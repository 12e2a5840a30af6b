"""How odd scripts are judged: under which strategies, beside which process, and in which words they are refused."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RunFailed
from tests.conformance import local_engine, virtual_engine
from tests.conformance.reference import Script, train_alone
from tests.conformance.scripts import EXACT, assert_close, launched
from tests.conformance.settings import SOON_S

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
EVERYWHERE = tuple(STRATEGIES)
FREE = ("ps-ssp", "ps-asp")
"""Their servers alone know how far workers may run apart."""
FAMILIES = (JOINT, (*FREE, *ALONE))
"""Those under which workers train alike, and those under which each has steps of its own. What is done with a script is
mostly the same under all strategies of one: see `covering`."""
ENGINES = {"virtual": virtual_engine, "processes": local_engine}

DRIFT = r"after step \d+ parameter '.*' is not the same on all ranks: on rank 1 .*Make the same change on every rank"
IN_PLACE = r"step \d: the script changed parameters in place on rank \d, but the servers own them.*or use all-reduce"
NO_GRADIENT = r"parameter '1\.weight' has no gradient on rank \d.*or use all-reduce"
TOGETHER = r"(leave out a batch or a step only where all do|every rank must step alike)"
SAME_STEP = r"all_gather in the training loop needs all workers at the same step.*worker\.meeting"
OWN_DIVISOR = r"the loss at .* is divided by .* each worker's own batch"


def judge(script: Script, engine: str, strategy: str, says: str | None, out: Path, *, is_compared: bool) -> None:
    """Two workers do what one process does with the combined batches, or are told what it `says`, at once. Where
    workers' models differ by design, one worker does what one process does."""
    run = partial(ENGINES[engine].run, partial(launched, script), strategy=strategy, options=STRATEGIES[strategy])
    if says is not None:
        began_s = time.monotonic()
        with pytest.raises(RunFailed, match=f"(?s){says}"):
            run(workers=2, out=out)
        assert time.monotonic() - began_s < SOON_S
        return
    result = run(workers=2, out=out / "two")
    assert all(tensor.isfinite().all() for tensor in result.model_state().values())
    if is_compared and strategy in JOINT:
        assert_close(result.model_state(), train_alone(script, 2), EXACT)
    elif is_compared:
        alone = run(workers=1, out=out / "one")
        assert_close(alone.model_state(), train_alone(script, 1), EXACT)
