"""Measures what the documentation shows, and writes it there: each number comes from a command that stands beside it.

A page marks a place with `<!-- result: NAME -->`, a block with one command or several, and `<!-- end -->`. This runs
the commands one after another, keeps the last line that each prints as docs/results/NAME.json, and puts their tables
between the marks, with the commit that they were measured on. The machine must have nothing else to do.

    python benchmarks/results.py                # everything
    python benchmarks/results.py throughput     # this one
    python benchmarks/results.py --list         # what there is, and of which commit
    python benchmarks/results.py --check        # whether the pages show what was measured last
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from report import markdown
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
KEPT = ROOT / "docs" / "results"
PLACE = re.compile(r"(<!-- result: (\S+) -->\n\n```bash\n(.*?)\n```\n)(.*?)(\n<!-- end -->)", re.DOTALL)
say = Console(stderr=True, highlight=False).print


class Place(NamedTuple):
    """Where a page shows a result."""

    name: str
    page: Path
    command: str
    """A line each."""


def places() -> dict[str, Place]:
    """Every marked place by its name. Raises ValueError if two have one name."""
    found: dict[str, Place] = {}
    for page in PAGES:
        for _, name, command, _, _ in PLACE.findall(page.read_text(encoding="utf-8")):
            if name in found:
                raise ValueError(f"{page.name} and {found[name].page.name} both have a result {name!r}")
            lines = command.replace("\\\n", " ").splitlines()
            found[name] = Place(name, page, "\n".join(" ".join(line.split()) for line in lines))
    return found


def measure(place: Place) -> dict[str, Any]:
    """What the commands tell, with the commands, the commit and how long they took. Raises CalledProcessError, and
    ValueError if none of them tells a table."""
    began_s, told = time.perf_counter(), [found for line in place.command.splitlines() if (found := _told(line))]
    if not told:
        raise ValueError(f"{place.name}: no command told a table")
    tables = [table for found in told for table in found["tables"]]
    took_s = round(time.perf_counter() - began_s)
    return {**told[-1], "command": place.command, "commit": commit(), "took_s": took_s, "tables": tables}


def _told(command: str) -> dict[str, Any]:
    """The last line of what it prints, where that is of `report.tell`; else nothing, as of one that only prepares."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    last = done.stdout.splitlines()[-1:] or [""]
    found: dict[str, Any] = json.loads(last[0]) if last[0].startswith("{") else {}
    return found if "tables" in found else {}


def commit() -> str:
    """The commit that is checked out; `+` says that files differ from it."""
    describe = ["git", "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def keep(place: Place, result: dict[str, Any]) -> None:
    KEPT.mkdir(exist_ok=True)
    file_of(place.name).write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def file_of(name: str) -> Path:
    return KEPT / f"{name}.json"


def kept(name: str) -> dict[str, Any]:
    """A result as it was measured last. Raises FileNotFoundError."""
    result: dict[str, Any] = json.loads(file_of(name).read_text(encoding="utf-8"))
    return result


def rendered(page: str) -> str:
    """The page with every result as it was measured last."""

    def fill(found: re.Match[str]) -> str:
        head, name, _, shown, tail = found.groups()
        if not file_of(name).exists():
            return f"{head}{shown}{tail}"
        result = kept(name)
        tables = "\n\n".join(markdown(table) for table in result["tables"])
        return f"{head}\n{tables}\n\n*Measured on commit {result['commit']}.*\n{tail}"

    return PLACE.sub(fill, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="results to measure; default all")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="show names, commits and commands, and measure nothing")
    instead.add_argument("--check", action="store_true", help="fail if a page does not show what was measured last")
    args = parser.parse_args()
    known = places()
    for name in args.names:
        if name not in known:
            parser.error(f"no result {name!r}; known are {', '.join(known)}")
    chosen = [known[name] for name in args.names or known]
    if args.list:
        for place in chosen:
            print(f"{place.name:<20}{kept(place.name)['commit']:<14}{place.command.replace(chr(10), '; ')}")
    elif args.check:
        sys.exit("; ".join(filter(None, map(mistake, chosen))) or None)
    else:
        measure_all(chosen)


def mistake(place: Place) -> str:
    """What is wrong with a place, if anything is."""
    if not file_of(place.name).exists():
        return f"{place.page.name}: {place.name} has not been measured"
    result, text = kept(place.name), place.page.read_text(encoding="utf-8")
    if result["command"] != place.command:
        return f"{place.page.name}: the command of {place.name} is not the one that was measured"
    return "" if rendered(text) == text else f"{place.page.name} does not show what was measured"


def measure_all(chosen: list[Place]) -> None:
    """Each that fails is named at the end; its page stays as it was."""
    failed = []
    for number, place in enumerate(chosen, 1):
        say(f"{number}/{len(chosen)} {place.name}:\n{place.command}")
        try:
            keep(place, measure(place))
        except subprocess.CalledProcessError as error:
            failed.append(f"{place.name} ended with {error.returncode}")
            continue
        except ValueError as error:
            failed.append(str(error))
            continue
        text = place.page.read_text(encoding="utf-8")
        place.page.write_text(rendered(text), encoding="utf-8")
    sys.exit("; ".join(failed) or None)


if __name__ == "__main__":
    main()
