"""What a step costs whom under parameter servers: each worker's time by kind, and the processors' time by process.

One run a strategy, one after another, a round at a time. In the middle of a run the processor time and the wake-ups of
the workers' and servers' processes are counted, and set in relation to the steps that the records hold for that while.
Where workers, servers and the rest of the machine together leave no core idle, the processors bind; where they do,
somebody waits to be told. Medians over the rounds, in microseconds a step of a worker.

    python benchmarks/server_profile.py --model convnet --batch-size 100
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import psutil
from report import tell
from rich.table import Table
from throughput import train

import paceline
from paceline.running.launch import Quiet

STRATEGIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "all-reduce": ("all-reduce", {}),
    "ps-bsp": ("ps-bsp", {}),
    "ps-bsp, 2 servers": ("ps-bsp", {"servers": 2}),
    "ps-asp": ("ps-asp", {}),
}
ROLES = {"ray::WorkerActor": "workers", "ray::ServerActor": "servers"}
ROWS = (
    "a step of a worker",
    "  computing",
    "  communicating",
    "  waiting for others",
    "processor, the worker",
    "processor, servers",
    "processor, others",
    "processor, idle",
    "wake-ups of the worker",
    "wake-ups of servers",
)
Account = dict[str, float]


@dataclass(frozen=True)
class Usage:
    """Of one role's processes, or of the machine."""

    processor_s: float = 0.0
    wake_ups: int = 0

    def since(self, earlier: Usage) -> Usage:
        return Usage(self.processor_s - earlier.processor_s, self.wake_ups - earlier.wake_ups)


def usage_by_role() -> dict[str, Usage]:
    """What the processes of each role have used so far; `all` is the whole machine, `idle` what nobody used."""
    machine = psutil.cpu_times()
    found = {"idle": Usage(machine.idle + machine.iowait), "workers": Usage(), "servers": Usage()}
    found["all"] = Usage(sum(machine) - machine.guest - machine.guest_nice)
    for process in psutil.process_iter(["cmdline"]):
        title = (process.info["cmdline"] or [""])[0].split(".")[0]
        if title in ROLES:
            times, switches = process.cpu_times(), process.num_ctx_switches()
            before = found[ROLES[title]]
            used_s = before.processor_s + times.user + times.system
            found[ROLES[title]] = Usage(used_s, before.wake_ups + switches.voluntary)
    return found


@dataclass
class Window:
    """A while in the middle of a run, between two looks at the processes."""

    begin_s: float = 0.0
    end_s: float = 0.0
    used: Mapping[str, Usage] | None = None

    def watch(self, *, after_s: float, for_s: float) -> None:
        """Wait for the workers' processes, then for the warm-up, and count."""
        while not usage_by_role()["workers"].processor_s:
            time.sleep(0.1)
        time.sleep(after_s)
        started, self.begin_s = usage_by_role(), time.monotonic()
        time.sleep(for_s)
        ended, self.end_s = usage_by_role(), time.monotonic()
        self.used = {role: ended[role].since(started[role]) for role in ended}


def account_of(name: str, *, model: str, num_workers: int, batch_size: int, seconds: float) -> Account:
    """One run's microseconds a step, by row."""
    strategy, options = STRATEGIES[name]
    window = Window()
    warmup_s = 4.0
    watcher = threading.Thread(target=window.watch, daemon=True, kwargs={"after_s": warmup_s, "for_s": seconds})
    watcher.start()
    with tempfile.TemporaryDirectory() as directory:
        result = paceline.run(
            partial(train, model, batch_size),
            strategy=strategy,
            options=options,
            workers=num_workers,
            max_time_s=seconds + warmup_s + 1.0,
            device="cpu",
            watcher=Quiet(),
            out=directory,
        )
        steps = result.steps
    watcher.join()
    assert window.used is not None
    used, duration_s = window.used, window.end_s - window.begin_s
    middle = [step for step in steps if warmup_s - 2.0 < step.time_s < warmup_s + seconds - 2.0]
    span_s = max(step.time_s for step in middle) - min(step.time_s for step in middle)
    num_steps = len(middle) / span_s * duration_s  # of all workers, while the processes were watched
    others_s = used["all"].processor_s - sum(used[role].processor_s for role in ("idle", "workers", "servers"))
    step_s = statistics.median(step.compute_s + step.communication_s + step.waiting_s for step in middle)
    seconds_of = {
        "a step of a worker": step_s,
        "  computing": statistics.median(step.compute_s for step in middle),
        "  communicating": statistics.median(step.communication_s for step in middle),
        "  waiting for others": statistics.median(step.waiting_s for step in middle),
        "processor, the worker": used["workers"].processor_s / num_steps,
        "processor, servers": used["servers"].processor_s / num_steps,
        "processor, others": others_s / num_steps,
        "processor, idle": used["idle"].processor_s / num_steps,
    }
    wake_ups = {
        "wake-ups of the worker": used["workers"].wake_ups / num_steps,
        "wake-ups of servers": used["servers"].wake_ups / num_steps,
    }
    return {row: value * 1e6 for row, value in seconds_of.items()} | wake_ups


def table_of(accounts: Mapping[str, Account], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("us a step of a worker", *accounts):
        table.add_column(heading, justify="right" if heading in accounts else "left")
    for row in ROWS:
        shape = "{:.1f}" if row.startswith("wake") else "{:,.0f}"
        table.add_row(row, *(shape.format(account[row]) for account in accounts.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--batch-size", type=int, default=100, help="samples a worker and step")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="for which a run is watched")
    args = parser.parse_args()
    rounds: list[dict[str, Account]] = []
    for _ in range(args.rounds):
        of = partial(
            account_of,
            model=args.model,
            num_workers=args.workers,
            batch_size=args.batch_size,
            seconds=args.seconds,
        )
        rounds.append({name: of(name) for name in STRATEGIES})
    accounts = {name: {row: statistics.median(one[name][row] for one in rounds) for row in ROWS} for name in STRATEGIES}
    title = f"{args.model}, batch {args.batch_size} a worker, {args.workers} workers, {os.cpu_count()} cores"
    tell([table_of(accounts, title)], {"workload": vars(args), "rounds": rounds})


if __name__ == "__main__":
    main()
