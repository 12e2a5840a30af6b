"""What every test shares: hypothesis profiles, the data folder, a Ray, and the check that nothing is left behind."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
import torch
from hypothesis import HealthCheck, settings

from paceline.engines import world
from paceline.training import summed_loss
from tests import programs, ray_forks

LEFTOVERS_GRACE_S = 100.0

# Helpers of multiprocessing that by design live as long as the process that started them.
STANDARD_LIBRARY_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

# Small models gain nothing by more threads, which fight for the cores that other tests use. Processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

# At Ray's niceness of 15, workers would starve beside other tests. Nor does Ray start workers for the first driver of a
# cluster that it was not asked for: members have settings of their own, for which it starts others.
os.environ.update(RAY_worker_niceness="0", RAY_prestart_worker_first_driver="0")
torch.set_num_threads(1)

# Nor do threads that wait, which else spin for a while: processes that have two threads, as a run of one worker, took
# 1.6 times as long and as much of the cores where three of them shared two. Servers that fork programs and workers have
# loaded torch before these begin.
os.environ["GOMP_SPINCOUNT"] = "0"

# No test turns the machine off: what this process has written is there also where the disk has it not yet. Simulated
# runs write checkpoints by the thousand, and each would wait for the disk twice.
os.fsync = lambda descriptor: None

# A look at a loss that fails stops no script, but a test.
summed_loss.SURPRISES = ()

# With CI set, the same examples every time. `make test-slow` asks for the profile `thorough`.
PATIENT = {"deadline": None, "derandomize": "CI" in os.environ, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=30, **PATIENT)
settings.register_profile("thorough", max_examples=200, **PATIENT)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Tests train on cores also where there are GPUs, but for those that `make test-gpu` runs."""
    if not config.option.markexpr.startswith("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that a look for GPUs leaves processes free to fork


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("there is no GPU here, or it is hidden: `make test-gpu` runs these tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those with a time limit of their own begin, which are the longest: a core that got one last would end late.
    Next to each other come those that start programs: few test processes have to start Ray then.

    `make test-slow` takes properties for the sake of more examples, and leaves out those that have none.
    """
    if "or hypothesis" in config.option.markexpr:
        repeated = {item for item in items if item.get_closest_marker("slow") is None and _has_own_number(item)}
        config.hook.pytest_deselected(items=list(repeated))
        items[:] = [item for item in items if item not in repeated]
    items.sort(key=lambda item: (item.get_closest_marker("timeout") is None, not _starts_programs(item)))


def _starts_programs(item: pytest.Item) -> bool:
    """Whether it takes a Ray or forks of programs, of which each test process has its own."""
    return item.get_closest_marker("ray") is not None or "program_forks" in getattr(item, "fixturenames", ())


def _has_own_number(item: pytest.Item) -> bool:
    """Whether a property says itself how many examples it has, whatever the profile."""
    chosen = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
    return chosen is not None and chosen.max_examples != settings.default.max_examples


def pytest_collection_finish() -> None:
    _leave_out_of_collections()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file's tests leave behind stays, mostly."""
    if nextitem is not None and nextitem.path != item.path:
        _leave_out_of_collections()


def _leave_out_of_collections() -> None:
    """What lives to the end is left out of the collections of garbage, of which a simulated run makes one: they would
    go through a million things each time, in half a second."""
    gc.collect()
    gc.freeze()
    gc.collect()  # from which Python learns how few are left, so that it collects often enough


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """The folder with the real data sets."""
    place = os.environ.get("PACELINE_DATA")
    if not place:
        pytest.skip("PACELINE_DATA is not set: it names the folder with the data sets")
    if not Path(place).is_dir():
        pytest.fail(f"PACELINE_DATA names {place}, which is not a folder")
    return Path(place)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the session if shared memory or processes outlive its tests.

    First among the session's fixtures to be set up, so the last to be torn down.
    """
    names_before = set(_shared_memory_names())
    yield
    processes = _wait_until_empty(_running_children)
    names = _wait_until_empty(lambda: sorted(_unowned(set(_shared_memory_names()) - names_before)))
    if processes or names:
        pytest.fail(f"the tests left processes {processes} and shared memory {names}", pytrace=False)


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """A test that leaves this process a worker's surroundings would have later ones train in them. Its script does not
    stay `__main__`: each process that `multiprocessing` starts from here would run it first, for ten seconds."""
    main = sys.modules["__main__"]
    yield
    left = world.current()
    world.enter(None)
    world.enter_here(None)
    sys.modules["__main__"] = main
    assert left is None


@pytest.fixture(scope="session")
def program_forks() -> Iterator[str]:
    """Python programs and Ray's workers are forked from a server that has loaded what they import."""
    with ray_forks.used(), programs.served() as folder:
        yield folder


@pytest.fixture
def forked_programs(program_forks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`paceline` and `python`, where they are called by these names, and what torchrun starts."""
    monkeypatch.setenv("PATH", f"{program_forks}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON_EXEC", os.path.join(program_forks, "python"))


@pytest.fixture(scope="session")
def ray_ends_with_the_session(program_forks: str) -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def ray_here(ray_ends_with_the_session: None) -> None:
    """This process is connected to a local Ray: the first module that asks starts it, and the others use it too."""
    if not ray.is_initialized():
        settings = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(address="local", num_cpus=4, object_store_memory=80_000_000, **settings)


def _wait_until_empty(look: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + LEFTOVERS_GRACE_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _running_children() -> list[str]:
    """Children and their children that still run; a zombie holds nothing and is not counted."""
    found: list[str] = []
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            is_zombie = child.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            continue
        if not is_zombie and not any(helper in command for helper in STANDARD_LIBRARY_HELPERS):
            found.append(f"{child.pid} ({command or child.name()})")
    return found


def _shared_memory_names() -> list[str]:
    folder = Path("/dev/shm")
    return [entry.name for entry in folder.iterdir() if "paceline" in entry.name] if folder.is_dir() else []


def _unowned(names: set[str]) -> set[str]:
    """Without the names that a process of another session has mapped: it will remove them itself."""
    if not names:
        return names
    for process in psutil.process_iter():
        if process.pid != os.getpid():
            names = names - _mapped_by(process)
    return names


def _mapped_by(process: psutil.Process) -> set[str]:
    try:
        return {Path(region.path).name for region in process.memory_maps() if region.path.startswith("/dev/shm/")}
    except psutil.Error:
        return set()
