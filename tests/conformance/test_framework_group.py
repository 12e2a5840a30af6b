"""torch.distributed's group among a run's workers, for frameworks that ask it who is there."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed
from torch.distributed import FileStore, PrefixStore

import paceline
from tests.conformance import local_engine
from tests.conformance.local_engine import wait_until

pytest.importorskip("accelerate")


def first_goes_early() -> None:
    """The second one opens the store's file as torch does when it lets go of a store."""
    from paceline.accelerate.group import join_group

    worker = paceline.init()
    join_group(worker)
    if worker.rank == 0:
        return
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, FileStore)
    file = Path(store.path)
    wait_until(lambda: not file.exists())
    store.set_timeout(timedelta(seconds=1))
    store.set("late", "here")
    file.unlink()


def test_a_worker_that_goes_first_leaves_the_others_a_store_to_go_from(tmp_path: Path) -> None:
    local_engine.run(first_goes_early, strategy="all-reduce", workers=2, out=tmp_path)
