"""How much of an all-reduce between hosts hides behind backward, and how much could.

Hosts are network namespaces with links of limited rate (Linux and root needed; see namespaces.py). Three runs, one
after another: training without exchange, an exchange that is hardly computed for, training with the exchange. What is
saved is how much shorter the third's step is than those of the others together. No more than backward, or the exchange,
could be hidden, whichever is shorter.

    sudo python benchmarks/overlap.py --hosts 2 --rates 1000 --batch-sizes 4 16 32
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from namespaces import Network, network
from network import HERE, NUM_WARMUP_STEPS, PACELINE, TIMEOUT_S, Contender, measure_local_s, measure_paceline, say
from report import tell
from rich.table import Table

import paceline


@dataclass(frozen=True)
class Row:
    """One workload on one network; times are medians over workers and steps after the warm-up, in seconds."""

    rate_mbit: float
    num_hosts: int
    batch_size: int
    local_s: float
    """A step without exchange."""
    backward_s: float
    exchange_s: float
    step_s: float
    hidden_s: float
    """As the records of the steps have it."""

    @property
    def saved_s(self) -> float:
        return self.local_s + self.exchange_s - self.step_s

    @property
    def share(self) -> float:
        """Of what could be hidden."""
        return self.saved_s / min(self.backward_s, self.exchange_s)


def measure(net: Network, ray: str, rate_mbit: float, batch_size: int, *, model: str, num_steps: int) -> Row:
    net.limit(rate_mbit)
    local_s, backward_s = plain_steps(net, model=model, batch_size=batch_size, num_steps=num_steps)
    hardly_s = measure_local_s(net, model=model, num_steps=num_steps)
    exchanges = measure_paceline(net, ray, Contender("", "all-reduce"), model=model, num_steps=num_steps)
    step_s, hidden_s = training_steps(net, ray, model=model, batch_size=batch_size, num_steps=num_steps)
    exchange_s = statistics.median(step["step_s"] for step in exchanges) - hardly_s
    num_hosts = len(net.hosts)
    row = Row(rate_mbit, num_hosts, batch_size, local_s, backward_s, exchange_s, step_s, hidden_s)
    say(f"{rate_mbit:g} Mbit/s, {num_hosts} hosts, batch {batch_size}: {row.saved_s:.3f} s saved, {row.share:.2f}")
    return row


def plain_steps(net: Network, *, model: str, batch_size: int, num_steps: int) -> tuple[float, float]:
    """Seconds of a step without exchange, on all hosts at the same time, and of its backward pass."""
    module = [sys.executable, "-m", "peers.backward", "--processes", str(len(net.hosts)), *workload(model, batch_size)]
    module += ["--steps", str(NUM_WARMUP_STEPS + num_steps)]
    outputs = net.run_all(dict.fromkeys(net.hosts, module), timeout_s=TIMEOUT_S)
    steps = [step for output in outputs for step in json.loads(output)[NUM_WARMUP_STEPS:]]
    return statistics.median(s["step_s"] for s in steps), statistics.median(s["backward_s"] for s in steps)


def training_steps(net: Network, ray: str, *, model: str, batch_size: int, num_steps: int) -> tuple[float, float]:
    """Seconds of a step with the exchange, and what of it the records call hidden."""
    with tempfile.TemporaryDirectory(dir=net.directory) as directory:
        out = Path(directory) / "run"
        command = [PACELINE, "run", str(HERE / "training_script.py"), "--strategy", "all-reduce"]
        command += ["--workers", str(len(net.hosts)), "--address", ray, "--device", "cpu", "--out", str(out)]
        command += ["--", *workload(model, batch_size), "--steps", str(NUM_WARMUP_STEPS + num_steps)]
        net.run(net.hosts[0], command, timeout_s=TIMEOUT_S)
        steps = [step for step in paceline.Result.open(out).steps if step.step > NUM_WARMUP_STEPS]
    whole_s = [step.compute_s + step.communication_s + step.waiting_s for step in steps]
    return statistics.median(whole_s), statistics.median(step.hidden_s for step in steps)


def workload(model: str, batch_size: int) -> list[str]:
    return ["--model", model, "--batch-size", str(batch_size)]


def table_of(rows: list[Row]) -> Table:
    table = Table(title="An all-reduce behind backward, in seconds", title_justify="left")
    for heading in ("Mbit/s", "hosts", "batch", "local step", "backward", "exchange", "step", "saved", "of possible"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = (row.local_s, row.backward_s, row.exchange_s, row.step_s, row.saved_s)
        numbers = (f"{row.rate_mbit:g}", str(row.num_hosts), str(row.batch_size))
        table.add_row(*numbers, *(f"{seconds:.3f}" for seconds in times), f"{row.share:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2], metavar="N", help="sizes of the network")
    parser.add_argument("--rates", type=float, nargs="+", default=[1000], metavar="MBIT", help="Mbit/s of a link")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 16, 32], help="samples a worker and step")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--iterations", type=int, default=8, help="measured steps, after one that warms up")
    args = parser.parse_args()
    rows = []
    for num_hosts in args.hosts:
        with network(num_hosts) as net:
            ray = net.start_ray()
            for rate_mbit in args.rates:
                for batch_size in args.batch_sizes:
                    rows.append(measure(net, ray, rate_mbit, batch_size, model=args.model, num_steps=args.iterations))
    described = [asdict(row) | {"saved_s": row.saved_s, "share": row.share} for row in rows]
    tell([table_of(rows)], {"model": args.model, "rows": described})


if __name__ == "__main__":
    main()
