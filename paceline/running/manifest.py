"""What a result directory says of its own origin."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline import durable
from paceline.config import RunConfig
from paceline.errors import UsageError
from paceline.pieces import Piece
from paceline.strategies import name_of
from paceline.strategies.base import Strategy

FILE_NAME = "manifest.json"
_PACKAGES = ("paceline", "torch", "ray", "pyzmq", "numpy")


def describe_run(
    *, program: str, arguments: Sequence[str], strategy: Strategy, num_workers: int, config: RunConfig
) -> dict[str, Any]:
    """Command, configuration, unit of an iteration, seed, versions, git commit and machine."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251 - a date
        "command": list(sys.argv),
        "working_directory": os.getcwd(),
        "program": program,
        "arguments": list(arguments),
        "strategy": {"name": name_of(strategy), **_options(strategy)},
        "unit": strategy.traits.unit,
        "num_workers": num_workers,
        "config": {**asdict(config), "eval_every": None if config.eval_every is None else str(config.eval_every)},
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in _PACKAGES}},
        "git_commit": _git_commit(Path(program).parent if os.path.exists(program) else Path.cwd()),
        "machine": describe_machine(),
    }


def describe_machine() -> dict[str, Any]:
    """The launcher's host."""
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def write(directory: Path, manifest: dict[str, Any]) -> None:
    """Raises OSError; what was there before stays then, since it says whose checkpoints are there."""
    with durable.whole(directory / FILE_NAME) as partial:
        partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read(directory: Path) -> dict[str, Any]:
    """The manifest of a result directory. Raises UsageError if the directory holds none."""
    path = directory / FILE_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory} is no result directory: {error}") from None
    if not isinstance(manifest, dict):
        raise UsageError(f"{path} is no manifest")
    return manifest


def _options(strategy: Strategy) -> dict[str, Any]:
    """Every option, with pieces as their texts."""
    values = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    return {name: str(value) if isinstance(value, Piece) else value for name, value in values.items()}


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


def _git_commit(directory: Path) -> str | None:
    """The commit of the script's repository, with `-dirty` where files differ from it."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
