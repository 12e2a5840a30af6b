"""Where and with what a study's trials were run, as each of them wrote it down; where they differ, which did."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.lab import words
from paceline.lab.runner import TRIALS
from paceline.running import manifest

_MAX_NAMES = 3


def origin(study: Path) -> dict[str, str]:
    """Facts by name: machine, versions, the commit of the script, and when trials were started.

    A trial whose manifest is damaged is named, and left out.
    """
    known: dict[str, dict[str, str]] = {}
    damaged = []
    for path in sorted((study / TRIALS).glob(f"[!.]*/{manifest.FILE_NAME}")):
        try:
            known[path.parent.name] = _facts(manifest.read(path.parent))
        except (UsageError, KeyError, TypeError):
            damaged.append(path.parent.name)
    facts = {}
    for name in next(iter(known.values()), {}):
        facts[name] = _together({trial: own[name] for trial, own in known.items()})
    if known:
        started = sorted({own["Started"] for own in known.values()})
        facts["Started"] = started[0] if len(started) == 1 else f"{started[0]}; the last trial {started[-1]}"
    if damaged:
        facts["Damaged manifests"] = words.listed(damaged, most=_MAX_NAMES)
    return {name: value for name, value in facts.items() if value}


def _facts(described: Mapping[str, Any]) -> dict[str, str]:
    machine = described["machine"]
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    parts = [machine["processor"], f"{machine['num_cores']} cores", memory, machine["system"], *machine["gpus"]]
    return {
        "Machine": ", ".join(parts),
        "Versions": ", ".join(f"{name} {number}" for name, number in described["versions"].items() if number),
        "Script's commit": described["git_commit"] or "",
        "Working directory": described.get("working_directory", ""),
        "Started": described["started"],
    }


def _together(values: Mapping[str, str]) -> str:
    """One value where all agree; else each with its trials, the most frequent first."""
    trials: dict[str, list[str]] = {}
    for trial, value in values.items():
        trials.setdefault(value, []).append(trial)
    if len(trials) == 1:
        return next(iter(trials))
    most_first = sorted(trials.items(), key=lambda item: -len(item[1]))
    named = [f"{value or 'none'} ({words.listed(names, most=_MAX_NAMES)})" for value, names in most_first]
    return f"they differ: {'; '.join(named)}"
