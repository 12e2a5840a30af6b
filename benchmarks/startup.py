"""How long a run takes from the command to its first step, beside what Ray and torch take by themselves.

Every contender is a fresh Python process on this machine, timed from its start: Ray alone until `ray.init` returns;
the same, and two actors that have imported torch and made an optimizer, with which torch loads its compiler; and
`paceline run` with two workers until worker 0 has made a step.

    python benchmarks/startup.py --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from report import tell
from rich.table import Table
from rounds import compile_paceline, ratio_of

from paceline.running.machine_load import Usage

_RAY = """
import sys, time
import ray
ray.init(address="local", include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False,
         logging_level="ERROR")
"""
_ACTORS = """
@ray.remote(num_cpus=0.5)
class Actor:
    def __init__(self):
        import torch
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    def ready(self):
        return True
ray.get([actor.ready.remote() for actor in [Actor.remote(), Actor.remote()]])
"""
_DONE = """
open(sys.argv[1], "w").write(str(time.monotonic()))
"""
_TRAINING = """
import sys, time
import torch
import paceline
worker = paceline.init()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=8)
model, optimizer, loader = worker.prepare(model, optimizer, loader)
for (x,) in loader:
    model(x).mean().backward()
    optimizer.step()
    break
if worker.rank == 0:
""" + _DONE.replace("\nopen", "\n    open")
_LAUNCHER = "from paceline.cli import main; main()"
_LIMIT_S, _LOOK_S = 120.0, 0.2


def python(code: str) -> list[str]:
    return ["-c", code]


def paceline_run(strategy: str) -> list[str]:
    return [*python(_LAUNCHER), "run", "train.py", "--strategy", strategy, "--workers", "2", "--out", "run", "--"]


CONTENDERS = {
    "ray.init": python(_RAY + _DONE),
    "ray.init and 2 actors with torch": python(_RAY + _ACTORS + _DONE),
    "paceline run, all-reduce": paceline_run("all-reduce"),
    "paceline run, ps-bsp": paceline_run("ps-bsp"),
}


class Start(NamedTuple):
    seconds: float
    """From the start of the process until it, or its worker 0, has written down that it is done."""
    core_seconds: float
    """What it and all that it started had used of the cores by then, as seen five times a second."""


def start(arguments: list[str]) -> Start:
    """Raises CalledProcessError if it fails, and TimeoutExpired if it hangs."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "train.py").write_text(_TRAINING)
        done, used_s = Path(directory) / "done", dict[int, float]()
        began_s = time.monotonic()
        command = [sys.executable, *arguments, str(done)]
        with subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not done.exists() and time.monotonic() < began_s + _LIMIT_S:
                time.sleep(_LOOK_S)
                used_s |= Usage.now().own_s
            try:
                process.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            if process.returncode != 0:
                raise subprocess.CalledProcessError(process.returncode, command)
        del used_s[os.getpid()]
        return Start(float(done.read_text()) - began_s, sum(used_s.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    args = parser.parse_args()
    compile_paceline()
    starts: dict[str, list[Start]] = {name: [] for name in args.only}
    for number in range(args.rounds):
        for name in args.only:
            starts[name].append(start(CONTENDERS[name]))
            print(f"round {number + 1}/{args.rounds}  {name}: {starts[name][-1]}", file=sys.stderr)
    table = Table("contender", "seconds", "lowest to highest", f"times {args.only[0]}", "core-seconds")
    times_s = {name: [each.seconds for each in found] for name, found in starts.items()}
    for name, values in times_s.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        core_s = statistics.median(each.core_seconds for each in starts[name])
        ratio = ratio_of(values, times_s[args.only[0]])
        table.add_row(name, f"{statistics.median(values):.2f}", spread, ratio, f"{core_s:.1f}")
    tell([table], {"starts": {name: [each._asdict() for each in found] for name, found in starts.items()}})


if __name__ == "__main__":
    main()
