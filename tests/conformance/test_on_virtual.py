"""The conformance checks over the virtual engine, in the place of the fast one."""

from __future__ import annotations

import pytest

from tests.conformance import rows, virtual_engine
from tests.conformance.test_asynchrony import *  # noqa: F403
from tests.conformance.test_conformance import *  # noqa: F403
from tests.conformance.test_ends import (
    test_a_worker_that_is_done_early_takes_part_in_the_others_pauses,
    test_max_steps_counts_as_the_literature_does,
    test_max_time_ends_the_run_for_all,
    test_script_that_goes_on_stepping_is_ended,
    test_target_ends_the_run_for_all,
    test_what_a_worker_is_left_with_after_the_loop,
)
from tests.conformance.test_equivalence import (
    test_parameters_unused_in_some_steps,
    test_servers_on_another_host_equal_one_process,
)
from tests.conformance.test_evaluation import *  # noqa: F403
from tests.conformance.test_refusals import test_backup_workers_have_no_mean_gradient_to_change
from tests.conformance.test_resume import *  # noqa: F403

__all__ = [
    "test_a_worker_that_is_done_early_takes_part_in_the_others_pauses",
    "test_backup_workers_have_no_mean_gradient_to_change",
    "test_max_steps_counts_as_the_literature_does",
    "test_max_time_ends_the_run_for_all",
    "test_parameters_unused_in_some_steps",
    "test_script_that_goes_on_stepping_is_ended",
    "test_servers_on_another_host_equal_one_process",
    "test_target_ends_the_run_for_all",
    "test_what_a_worker_is_left_with_after_the_loop",
]


@pytest.fixture(autouse=True)
def on_the_virtual_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "local_engine", virtual_engine)
    monkeypatch.setattr("tests.conformance.test_equivalence.local_engine", virtual_engine)
