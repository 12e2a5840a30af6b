"""torch's own tests of torch.distributed, over the backend `paceline`: a program that runs those it is given, or all.

    python -m tests.distributed.torch_suite [test_all_reduce_sum ...]

The tests ship with torch, and decide by the backend's name what they ask of it. Here they ask for what gloo does, which
is torch's backend for CPUs, and for what they ask of MPI alone. Those that need GPUs leave themselves out.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from paceline.torch_backend import BACKEND_NAME

WORLD_SIZE, LARGE_WORLD_SIZE = "4", "8"
"""Some tests leave themselves out for one of the two."""
MEETING_S = 300
LOADED = ("paceline.torch_backend.process_group", "torch.testing._internal.common_device_type", "torch._dynamo")
"""What each of a test's processes would load, in a quarter of a second."""
TOO_SMALL = "Skipped due to small world size."
OF_MPI = "Only MPI supports"

_MONITORED = "torch itself refuses monitored_barrier for every backend but gloo"
_WORDING = "expects gloo's words for a timeout; Paceline's error names the ranks that are missing"
LEFT_OUT = {
    "test_monitored_barrier_allreduce_hang": _MONITORED,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _MONITORED,
    "test_monitored_barrier_failure_order": _MONITORED,
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_monitored_barrier_wait_all_ranks": _MONITORED,
    "test_barrier_timeout_full_group": _WORDING,
    "test_barrier_timeout_global": _WORDING,
    "test_barrier_timeout_group": _WORDING,
}


class _Name(str):
    """The backend's name, which the tests take for gloo's as well."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other in (str(self), "gloo")

    def __ne__(self, other: object) -> bool:
        return not self == other


def _load() -> ModuleType:
    os.environ.update(BACKEND="gloo", WORLD_SIZE=WORLD_SIZE, INIT_METHOD="env://")
    from torch.testing._internal.distributed import distributed_test

    for name in LOADED:
        import_module(name)

    os.environ["BACKEND"] = BACKEND_NAME
    distributed_test.BACKEND = _Name(BACKEND_NAME)  # type: ignore[attr-defined]
    distributed_test.default_pg_timeout = MEETING_S
    return distributed_test


theirs = _load()


class TorchSuite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
    """Every test runs in processes of its own, one a rank, forked from this one."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    def _barrier(self, *arguments: Any, **settings: Any) -> None:
        """Where eight processes share two busy cores, the seconds that tests give may not do."""
        theirs.Barrier.sync(*arguments, **{**settings, "timeout": MEETING_S})


for _test in vars(theirs.DistributedTest._DistTestBase).values():
    if getattr(_test, "__unittest_skip_why__", "").startswith(OF_MPI):
        _test.__unittest_skip__ = False


def run(names: Iterable[str], world_size: str) -> Any:
    os.environ["WORLD_SIZE"] = world_size
    suite = unittest.TestSuite(TorchSuite(name) for name in names)
    return unittest.TextTestRunner(verbosity=2).run(suite)


def main() -> int:
    """0 if no test failed; the last line says how many passed."""
    names = sys.argv[1:] or unittest.defaultTestLoader.getTestCaseNames(TorchSuite)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TEMP_DIR"] = tempfile.tempdir = folder  # also for each test's store, whose file it leaves there
        first = run([name for name in names if name not in LEFT_OUT], WORLD_SIZE)
        too_large = [test._testMethodName for test, reason in first.skipped if reason == TOO_SMALL]
        second = run(too_large, LARGE_WORLD_SIZE)
    skipped = Counter(reason for _, reason in [*first.skipped, *second.skipped] if reason != TOO_SMALL)
    for reason, count in skipped.most_common():
        print(f"{count} left themselves out: {reason}")
    num_bad = sum(len(found) for result in (first, second) for found in (result.errors, result.failures))
    num_run = first.testsRun + second.testsRun - len(first.skipped) - len(second.skipped)
    print(f"{num_run - num_bad} passed, {num_bad} failed")
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
