"""Workers and agents of a test's Ray, which `tests/programs.py` forks: 4 s of a core less for each worker.

Ray's node manager is told to start its workers by this file. Where no server of forks is, they start as ever.

Of Ray's own processes those are left out that no test and nothing of Paceline's asks: what scales a cluster, what sends
workers' output to drivers, and the dashboard where a program wants none. That is 3 s of a core less for each Ray. And
Ray may take longer to start than the half minute for which it would wait, as it does where tests keep all cores busy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

_HERE = Path(__file__)
_COMMAND = "_build_python_executable_command_memory_profileable"
_PATIENCE_S = 300.0


@contextmanager
def used() -> Iterator[None]:
    """Meanwhile every Ray that this process starts gets its workers so."""
    from ray._private import parameter, services

    params = parameter.RayParams.update_if_absent
    before = {name: getattr(services, name) for name in (_COMMAND, "get_node", "start_api_server")}
    _fork_workers(parameter)
    _change_start(services)
    try:
        yield
    finally:
        parameter.RayParams.update_if_absent = params  # type: ignore[method-assign]
        for name, was in before.items():
            setattr(services, name, was)


def use_in_program() -> None:
    """As `used`, from when this process loads Ray, if it ever does."""
    sys.meta_path.insert(0, OnceLoaded({**_LESS, "ray._private.parameter": _fork_workers}))


class OnceLoaded(MetaPathFinder):
    """Changes modules as they are loaded, by their names."""

    def __init__(self, changes: Mapping[str, Callable[[Any], None]]) -> None:
        self._left = dict(changes)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        change = self._left.pop(name, None)
        if change is None:
            return None
        found = find_spec(name)
        assert found is not None
        assert found.loader is not None
        load = found.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        found.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return found


def _fork_workers(parameter: Any) -> None:
    _leave_out_monitors(parameter, setup_worker_path=str(_HERE))


def _leave_out_monitors(parameter: Any, **more: object) -> None:
    """Of this module is Ray's class of what it is started with; `more` stands in place of what a node would set."""
    params = parameter.RayParams
    before = params.update_if_absent

    def update_if_absent(self: Any, **settings: object) -> None:
        if "setup_worker_path" in settings:  # a node's settings
            self.no_monitor = True
            settings |= {"include_log_monitor": False, **more}
        before(self, **settings)

    params.update_if_absent = update_if_absent


def _change_start(services: Any) -> None:
    """Of this module is what starts Ray's processes, and waits for them."""
    _fork_agents(services)
    _start_patiently(services)


def _fork_agents(services: Any) -> None:
    made = getattr(services, _COMMAND)

    def command(component: str, *given: object, **named: object) -> list[str]:
        if component.endswith("_agent") and os.environ.get("PACELINE_TEST_FORKS"):
            return [sys.executable, "-S", "-E", str(_HERE.with_name("programs.py"))]
        return list(made(component, *given, **named))

    setattr(services, _COMMAND, command)


def _start_patiently(services: Any) -> None:
    start = services.start_api_server

    def start_api_server(include_dashboard: bool | None, *given: object, **named: object) -> object:
        return (None, None) if include_dashboard is False else start(include_dashboard, *given, **named)

    services.start_api_server = start_api_server
    look = services.get_node

    def get_node(*given: object, **named: object) -> object:
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return look(*given, **named)
            except RuntimeError:
                if time.monotonic() > until_s or _has_ended("raylet"):
                    raise
            time.sleep(0.1)

    services.get_node = get_node


def _has_ended(name: str) -> bool:
    """Whether a child with this name has ended, and this process has not asked for its status."""
    return any(child.name() == name and child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())


_LESS = {"ray._private.parameter": _leave_out_monitors, "ray._private.services": _change_start}


def main() -> None:
    """What Ray's setup_worker.py does, and the program that it gives its place to."""
    sys.path.insert(0, str(_HERE.parents[1]))
    from tests.programs import ADDRESS, Program

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    given, program = parser.parse_known_args()
    context = json.loads(given.serialized_runtime_env_context)
    if not os.environ.get(ADDRESS) or context.get("command_prefix") or given.language != "PYTHON":
        os.execv(sys.executable, [sys.executable, str(_rays_own()), *sys.argv[1:]])
    environment = {**os.environ, **(context.get("env_vars") or {})}
    streams = (0, 1, 2)
    sys.exit(
        Program(program, directory=os.getcwd(), environment=environment, streams=streams, is_rays_worker=True).wait()
    )


def _rays_own() -> Path:
    found = find_spec("ray")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).with_name("_private") / "workers" / "setup_worker.py"


if __name__ == "__main__":
    main()
