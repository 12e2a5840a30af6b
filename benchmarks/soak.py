"""Hours of one elastic run whose workers and hosts come and go: does it keep its rate, its memory and its descriptors?

Hosts are network namespaces of this machine (Linux and root needed), the first of which has the launcher. Again and
again one worker is killed or stopped, a host is cut off and comes back as a new one, or the run is told to have one
worker less and then one more. What is struck is drawn by a seed; the next comes once all workers train again, and some
seconds later. One worker beside the launcher is left alone, so that it shows what one keeps of all that. Workers sleep
between steps, so that they do not fight for the cores that they share.

    sudo python benchmarks/soak.py --hours 2

The rate is that of stretches in which all workers train and none comes or goes, by tenths of the time; memory is what
a process has for itself (its unique set size). What a step takes of a core hardly depends on what else runs there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, final

import psutil
from namespaces import SWITCH, Host, Network, network
from report import tell
from rich.table import Table

from paceline.records import StepRecord
from paceline.running.result import Result

SCRIPT = Path(__file__).with_name("churn_script.py")
PACELINE = str(Path(sys.executable).with_name("paceline"))
NICENESS = -10
PARTS = 10
"""Of the time, each of which has its own row."""
STRETCH = 25  # steps in a row with the same workers, whose rate counts
PATIENCE_S = 240.0
CUT_S = 15.0
"""Longer than any lease: who was cut off has ended by then."""
REST_S = (10.0, 30.0)
JOINS = 5
"""Attempts of a host to come back."""


@dataclass(frozen=True)
class Sample:
    """What the run's processes have at a time."""

    time_s: float
    launcher_mb: float
    launcher_descriptors: int
    worker_mb: float
    """Of the worker that is left alone."""
    worker_descriptors: int
    worker_threads: int
    worker_cpu_s: float
    """Since it began."""


@final
@dataclass
class Soak:
    """One run and what strikes it.

    Args:
        out: the run's directory.
        beside: a folder in which each worker is a file.
    """

    net: Network
    ray: str
    workers: int
    out: Path
    beside: Path
    draws: random.Random
    process: subprocess.Popen[bytes] = field(init=False)
    launcher: psutil.Process = field(init=False)
    spared: psutil.Process = field(init=False)

    def start(self, batch_size: int, sleep_s: float, log: IO[bytes]) -> None:
        settings = ["--elastic", f"1:{self.workers}", "--workers", str(self.workers), "--replace", "1000000"]
        settings += ["--address", self.ray, "--device", "cpu", "--out", str(self.out)]
        script = ["--batch-size", str(batch_size), "--sleep-s", str(sleep_s), "--workers", str(self.beside)]
        command = self.net.hosts[0].command([PACELINE, "run", str(SCRIPT), *settings, "--", *script])
        environment = {**os.environ, **self.net.environment}
        self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.wait_for_all()
        self.launcher = next(
            process for process in on_host(self.net.hosts[0]) if "run" in process.cmdline() and is_ours(process)
        )
        beside = on_host(self.net.hosts[0])
        self.spared = next(worker for worker in self.alive() if worker in beside)

    def alive(self) -> list[psutil.Process]:
        """Workers that train, the oldest first."""
        found = []
        for file in sorted(self.beside.iterdir(), key=lambda path: path.stat().st_mtime):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(file.name))
                if process.create_time() > file.stat().st_mtime:
                    continue  # another process, which has a dead worker's number
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                    found.append(process)
        return found

    def wait_for_all(self) -> None:
        """Raises RuntimeError if the run has ended, or is not whole again in time."""
        self._wait(lambda: len(self.alive()) == self.workers, what=f"{self.workers} workers")

    def _wait(self, condition: Callable[[], bool], *, what: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"the run has ended with {self.process.returncode}")
            if time.monotonic() > until_s:
                raise RuntimeError(f"no {what} within {PATIENCE_S:g} s")
            time.sleep(0.2)

    def strike(self) -> str:
        """Whom, and how. All workers train again when this returns."""
        kind = self.draws.choices(("kill", "stop", "host", "scale"), weights=(4, 2, 1, 1))[0]
        if kind == "host":
            return self._cut_off(self.draws.choice(self.net.hosts[1:]))
        if kind == "scale":
            return self._leave_and_join()
        struck = self.draws.choice([worker for worker in self.alive() if worker != self.spared])
        struck.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        self._wait(lambda: not struck.is_running() or struck.status() == psutil.STATUS_ZOMBIE, what="end of the worker")
        self.wait_for_all()
        return f"{kind} {struck.pid}"

    def _leave_and_join(self) -> str:
        self._scale(self.workers - 1)
        self._wait(lambda: len(self.alive()) == self.workers - 1, what="worker less")
        self._scale(self.workers)
        self.wait_for_all()
        return "scale"

    def _scale(self, workers: int) -> None:
        command = [PACELINE, "scale", str(self.out), "--workers", str(workers)]
        self.net.run(self.net.hosts[0], command, timeout_s=PATIENCE_S)

    def _cut_off(self, host: Host) -> str:
        self._link(host, "down")
        time.sleep(CUT_S)
        for process in on_host(host):  # Ray's, which give a lost head node a minute
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._link(host, "up")
        self._join(host)
        self.wait_for_all()
        return f"host {host.name}"

    def _join(self, host: Host) -> None:
        """Ray may take longer than it gives itself where other programs have the cores."""
        for _ in range(JOINS - 1):
            with contextlib.suppress(RuntimeError):
                self.net.join_ray(host, self.ray)
                return
        self.net.join_ray(host, self.ray)

    def _link(self, host: Host, state: str) -> None:
        port = f"port{self.net.hosts.index(host) + 1}"
        subprocess.run(["ip", "-n", SWITCH, "link", "set", port, state], check=True)

    def sample(self, began_s: float) -> Sample:
        return Sample(
            time.monotonic() - began_s,
            launcher_mb=self.launcher.memory_full_info().uss / 1e6,
            launcher_descriptors=self.launcher.num_fds(),
            worker_mb=self.spared.memory_full_info().uss / 1e6,
            worker_descriptors=self.spared.num_fds(),
            worker_threads=self.spared.num_threads(),
            worker_cpu_s=self.spared.cpu_times().user + self.spared.cpu_times().system,
        )

    def stop(self) -> None:
        """Raises RuntimeError if the run does not end as one that was told to."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=PATIENCE_S)


def is_ours(process: psutil.Process) -> bool:
    return any(Path(part).name == "paceline" for part in process.cmdline())


def on_host(host: Host) -> list[psutil.Process]:
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
    found = []
    for pid in listed.stdout.split():
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(int(pid)))
    return found


def stretches(steps: Sequence[StepRecord], *, workers: int) -> Iterator[tuple[float, float]]:
    """When each stretch ended, and its samples a second."""
    by_iteration = {
        iteration: list(some)
        for iteration, some in itertools.groupby(
            sorted(steps, key=lambda step: step.iteration), key=lambda step: step.iteration
        )
    }
    run: list[list[StepRecord]] = []
    for iteration in sorted(by_iteration):
        now = by_iteration[iteration]
        is_next = bool(run) and run[-1][0].iteration == iteration - 1
        same = is_next and {step.worker for step in run[-1]} == {step.worker for step in now}
        run = [*run, now] if same else [now]
        if len(run) == STRETCH + 1:
            ends_s = [max(step.time_s for step in some) for some in (run[0], run[-1])]
            if len(now) == workers:
                samples = sum(step.samples for some in run[1:] for step in some)
                yield ends_s[1], samples / (ends_s[1] - ends_s[0])
            run = []


def cpu_ms(samples: Sequence[Sample], ends_s: Sequence[float]) -> float | None:
    """What the worker that is left alone takes of a core for a step.

    Args:
        ends_s: of all steps.
    """
    first, last = samples[0], samples[-1]
    num_steps = sum(first.time_s <= end_s < last.time_s for end_s in ends_s)
    return 1e3 * (last.worker_cpu_s - first.worker_cpu_s) / num_steps if num_steps else None


def table_of(
    samples: Sequence[Sample],
    rates: Sequence[tuple[float, float]],
    strikes: Sequence[tuple[float, str]],
    ends_s: Sequence[float],
) -> Table:
    length_s = max(samples[-1].time_s, rates[-1][0] if rates else 0.0) / PARTS
    table = Table(title="one run under churn", title_justify="left")
    names = ("until, min", "struck", "samples/s, all workers", "launcher, MB", "its descriptors", "a worker, MB")
    for name in (*names, "its descriptors", "its threads", "its CPU, ms a step"):
        table.add_column(name, justify="right")
    for part in range(PARTS):
        start_s, stop_s = part * length_s, (part + 1) * length_s
        own = [sample for sample in samples if start_s <= sample.time_s < stop_s] or list(samples[-1:])
        found = [rate for time_s, rate in rates if start_s <= time_s < stop_s]
        step_ms = cpu_ms(own, ends_s)
        table.add_row(
            f"{stop_s / 60:.0f}",
            str(sum(start_s <= time_s < stop_s for time_s, _ in strikes)),
            f"{statistics.median(found):.1f}" if found else "-",
            f"{statistics.median(sample.launcher_mb for sample in own):.0f}",
            str(own[-1].launcher_descriptors),
            f"{statistics.median(sample.worker_mb for sample in own):.0f}",
            str(own[-1].worker_descriptors),
            str(own[-1].worker_threads),
            "-" if step_ms is None else f"{step_ms:.1f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--sleep-s", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.hours <= 0:
        parser.error("--hours must be above 0")
    os.nice(NICENESS)
    samples: list[Sample] = []
    strikes: list[tuple[float, str]] = []
    with network(args.hosts) as net:
        out, beside = net.directory / "run", net.directory / "workers"
        beside.mkdir()
        soak = Soak(net, net.start_ray(), args.workers, out, beside, random.Random(args.seed))
        with (net.directory / "log").open("wb") as log:
            soak.start(args.batch_size, args.sleep_s, log)
        began_s = time.monotonic()
        try:
            while (now_s := time.monotonic() - began_s) < 3600 * args.hours:
                samples.append(soak.sample(began_s))
                print(json.dumps(asdict(samples[-1])), file=sys.stderr, flush=True)
                time.sleep(soak.draws.uniform(*REST_S))
                strikes.append((now_s, soak.strike()))
                print(strikes[-1], file=sys.stderr, flush=True)
            soak.stop()
        except Exception:
            print((net.directory / "log").read_text()[-5000:], file=sys.stderr)
            raise
        steps = Result.open(out).steps
    rates = list(stretches(steps, workers=args.workers))
    ends_s = list({step.iteration: step.time_s for step in steps}.values())
    facts = {"workload": vars(args), "strikes": strikes, "rates": rates, "samples": [asdict(one) for one in samples]}
    tell([table_of(samples, rates, strikes, ends_s)], facts)


if __name__ == "__main__":
    main()
