"""Some of the conformance checks over processes that meet over NCCL."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from tests.conformance import local_engine, rows
from tests.conformance.test_conformance import (
    test_accumulation_makes_one_step_of_several_batches,
    test_clipped_gradients_are_what_is_applied,
    test_groups_keep_their_settings,
    test_loss_falls_and_every_number_is_logged,
    test_non_finite_gradient_is_skipped,
    test_prepare_starts_all_from_rank_0_and_divides_the_data,
)
from tests.conformance.test_evaluation import test_evaluation_sees_the_global_model_and_leaves_no_trace
from tests.conformance.test_resume import test_run_that_ended_by_its_budget_goes_on_bit_for_bit

__all__ = [
    "test_accumulation_makes_one_step_of_several_batches",
    "test_clipped_gradients_are_what_is_applied",
    "test_evaluation_sees_the_global_model_and_leaves_no_trace",
    "test_groups_keep_their_settings",
    "test_loss_falls_and_every_number_is_logged",
    "test_non_finite_gradient_is_skipped",
    "test_prepare_starts_all_from_rank_0_and_divides_the_data",
    "test_run_that_ended_by_its_budget_goes_on_bit_for_bit",
]
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def over_nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.getfixturevalue("row").name == "ring":
        pytest.skip("over NCCL all-reduce algorithms of single messages are refused")
    run = partial(local_engine.run, device="cuda")
    monkeypatch.setattr(rows, "local_engine", SimpleNamespace(run=run, wait_until=local_engine.wait_until))
