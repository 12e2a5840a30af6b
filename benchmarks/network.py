"""What an exchange of gradients costs between hosts, beside what the links allow and beside PyTorch's DDP over gloo.

Hosts are network namespaces on this machine, joined by a switch, each with a link of limited rate (Linux and root
needed; see namespaces.py); each runs one Ray node and one worker. Workers exchange gradients as large as ResNet-18's
(45 MB) and hardly compute. The time of an exchange is that of the worker's step, less that of a step without exchange
under plain PyTorch, on all hosts at a time: whatever Paceline or DDP does beyond it is the exchange's. Limits are those
of the busiest link, at the goodput that a plain TCP stream reached on a link just before:

                                            limit                   floor
    all-reduce, n workers, M bytes          2 (n - 1) / n           2 (n - 1) / n       x M / goodput
    ps-bsp, k servers                       2 (n - 1) / k           max(1, (n + k - 2) / k)
    ps-asp, 1 server                        max(2, n - 1)           max(1, n - 1)

The all-reduce's is Patarasuk and Yuan's (2009). A server shares its host with a worker, as Paceline places them: server
i is on host i, and what this worker says to it crosses no link, which leaves n - 1 workers that push M / k to it and
pull as much. With as many servers as hosts the limit is that of the all-reduce. The limit has all push before any
pulls; the floor, which no long run can beat, has every link full both ways. Synchronous steps may pass the limit:
whoever is answered first pushes again while others are still being answered. Asynchronous workers keep both directions
of the server's link busy, but one worker's own push and pull follow each other; the worker that shares the only
server's host is left out of its numbers.

    sudo python benchmarks/network.py --hosts 2 4 8 --rates 100 1000 --json network.json --figures docs/figures

Rows of an earlier run in the JSON file stay unless they are measured again, so that parts can be run at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from namespaces import CONGESTION_CONTROL, Network, network
from peers.exchange import gradient_bytes
from plots import Series, line_chart
from rich.console import Console
from rich.table import Table

import paceline
from paceline.running.manifest import describe_machine

HERE = Path(__file__).parent
PACELINE = str(Path(sys.executable).parent / "paceline")
PEER = "ddp-gloo"
NUM_WARMUP_STEPS = 1
TIMEOUT_S = 1200.0
TABLE_WIDTH = 120
ACCOUNT = ("compute_s", "communication_s", "waiting_s")


@dataclass(frozen=True)
class Contender:
    """One way to exchange; `strategy` is empty for the peer."""

    name: str
    strategy: str = ""
    options: Mapping[str, object] = field(default_factory=dict)

    def num_servers(self, num_hosts: int) -> int:
        """0 without servers; `hosts` stands for one a host."""
        servers = self.options.get("servers", 0)
        return num_hosts if servers == "hosts" else int(str(servers))

    def limit(self, num_hosts: int) -> float:
        """How many times the gradient passes the busiest link, one direction after the other where that is the rule."""
        if self.strategy == "ps-asp":
            return max(2, num_hosts - 1)
        return 2 * (num_hosts - 1) / (self.num_servers(num_hosts) or num_hosts)

    def floor(self, num_hosts: int) -> float:
        """The same with both directions always full."""
        num_servers = self.num_servers(num_hosts)
        return max(1, (num_hosts + num_servers - 2) / num_servers) if num_servers else self.limit(num_hosts)


CONTENDERS = (
    Contender(PEER),
    Contender("all-reduce", "all-reduce"),
    Contender("all-reduce, ring", "all-reduce", {"algorithm": "ring"}),
    Contender("ps-bsp, 1 server", "ps-bsp", {"servers": 1}),
    Contender("ps-bsp, 2 servers", "ps-bsp", {"servers": 2}),
    Contender("ps-bsp, n servers", "ps-bsp", {"servers": "hosts"}),
    Contender("ps-asp, 1 server", "ps-asp", {"servers": 1}),
)


@dataclass(frozen=True)
class Row:
    """One contender on one network; times are medians over workers and steps after the warm-up."""

    rate_mbit: float
    num_hosts: int
    contender: str
    step_s: float
    lowest_s: float
    highest_s: float
    local_s: float
    """A step without exchange."""
    limit_s: float
    floor_s: float
    goodput_mbit: float
    goodput_together_mbit: float
    account: Mapping[str, float]
    """How Paceline divides the step: compute_s, communication_s, waiting_s."""

    @property
    def exchange_s(self) -> float:
        return self.step_s - self.local_s

    @property
    def key(self) -> tuple[float, int, str]:
        return self.rate_mbit, self.num_hosts, self.contender


Steps = Sequence[Mapping[str, float]]
"""One mapping a step of a worker: step_s, and what Paceline divides it into."""


def measure_paceline(net: Network, ray: str, contender: Contender, *, model: str, num_steps: int) -> Steps:
    """The steps after the warm-up, of every worker that does not have all servers on its own host."""
    num_hosts = len(net.hosts)
    options = {**contender.options}
    if "servers" in options:
        options["servers"] = contender.num_servers(num_hosts)
    with tempfile.TemporaryDirectory(dir=net.directory) as directory:
        out = Path(directory) / "run"
        command = [PACELINE, "run", str(HERE / "exchange_script.py"), "--strategy", contender.strategy]
        command += ["--workers", str(num_hosts), "--address", ray, "--device", "cpu", "--out", str(out)]
        command += [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
        command += ["--", "--model", model, "--steps", str(NUM_WARMUP_STEPS + num_steps)]
        net.run(net.hosts[0], command, timeout_s=TIMEOUT_S)
        steps = [step for step in paceline.Result.open(out).steps if step.step > NUM_WARMUP_STEPS]
    if contender.strategy == "ps-asp" and contender.num_servers(num_hosts) == 1:
        steps = [step for step in steps if step.worker != 0]
    accounts = [{name: getattr(step, name) for name in ACCOUNT} for step in steps]
    return [{"step_s": sum(account.values()), **account} for account in accounts]


def measure_ddp(net: Network, *, model: str, num_steps: int) -> Steps:
    """The same under DDP."""
    module = exchange_module("peers.ddp_exchange", model, num_steps)
    module += ["--size", str(len(net.hosts)), "--address", net.hosts[0].address, "--rank"]
    outputs = net.run_all({host: [*module, str(rank)] for rank, host in enumerate(net.hosts)}, timeout_s=TIMEOUT_S)
    return [{"step_s": step_s} for output in outputs for step_s in json.loads(output)[NUM_WARMUP_STEPS:]]


def measure_local_s(net: Network, *, model: str, num_steps: int) -> float:
    """Seconds of a step without exchange, on all hosts at the same time."""
    module = exchange_module("peers.exchange", model, num_steps)
    outputs = net.run_all(dict.fromkeys(net.hosts, module), timeout_s=TIMEOUT_S)
    steps_s: list[float] = [step_s for output in outputs for step_s in json.loads(output)[NUM_WARMUP_STEPS:]]
    return statistics.median(steps_s)


def exchange_module(name: str, model: str, num_steps: int) -> list[str]:
    return [sys.executable, "-m", name, "--model", model, "--steps", str(NUM_WARMUP_STEPS + num_steps)]


def measure_goodput(net: Network, *, together: bool) -> float:
    """Bytes per second that a TCP stream gets across: one alone, or from every host to the next at the same time."""
    module = [sys.executable, "-m", "peers.tcp_goodput"]
    hosts = net.hosts
    commands = {
        host: [*module, "--listen", host.address, "--send", following.address]
        for host, following in zip(hosts, [*hosts[1:], hosts[0]], strict=True)
    }
    if not together:
        commands = {hosts[0]: [*module, "--send", hosts[1].address], hosts[1]: [*module, "--listen", hosts[1].address]}
    outputs = net.run_all(commands, timeout_s=TIMEOUT_S)
    return statistics.median(float(output) for output in outputs if output)


def measure(
    net: Network, ray: str, rate_mbit: float, contenders: Sequence[Contender], *, model: str, num_steps: int
) -> Iterator[Row]:
    """Every contender, one after another, on a network of one rate."""
    net.limit(rate_mbit)
    alone, together = measure_goodput(net, together=False), measure_goodput(net, together=True)
    num_hosts, num_bytes = len(net.hosts), gradient_bytes(model)
    local_s = measure_local_s(net, model=model, num_steps=num_steps)
    goodputs = f"goodput {to_mbit(alone):.0f} Mbit/s, {to_mbit(together):.0f} with all links at work"
    say(f"{rate_mbit:g} Mbit/s, {num_hosts} hosts: {goodputs}; {local_s:.3f} s a step without exchange")
    for contender in contenders:
        if contender.strategy:
            steps = measure_paceline(net, ray, contender, model=model, num_steps=num_steps)
        else:
            steps = measure_ddp(net, model=model, num_steps=num_steps)
        whole_s = [step["step_s"] for step in steps]
        row = Row(
            rate_mbit=rate_mbit,
            num_hosts=num_hosts,
            contender=contender.name,
            step_s=statistics.median(whole_s),
            lowest_s=min(whole_s),
            highest_s=max(whole_s),
            local_s=local_s,
            limit_s=contender.limit(num_hosts) * num_bytes / alone,
            floor_s=contender.floor(num_hosts) * num_bytes / alone,
            goodput_mbit=to_mbit(alone),
            goodput_together_mbit=to_mbit(together),
            account={name: statistics.median(step[name] for step in steps) for name in ACCOUNT if name in steps[0]},
        )
        say(f"  {row.contender}: {row.step_s:.2f} s a step, exchange {row.exchange_s:.2f} s, limit {row.limit_s:.2f} s")
        yield row


def table_of(rows: Sequence[Row]) -> Table:
    """Rates, hosts and contenders in the order they were measured."""
    headings = ["Mbit/s", "hosts", "contender", "s a step", "lowest", "highest", "exchange", "limit", "floor"]
    table = Table(title="Exchange of one gradient", title_justify="left")
    for heading in [*headings, "of limit", "DDP's / its"]:
        table.add_column(heading, justify="left" if heading == "contender" else "right", no_wrap=True)
    peers = {(row.rate_mbit, row.num_hosts): row for row in rows if row.contender == PEER}
    for row in rows:
        peer = peers.get((row.rate_mbit, row.num_hosts))
        times = (row.step_s, row.lowest_s, row.highest_s, row.exchange_s, row.limit_s, row.floor_s)
        table.add_row(
            f"{row.rate_mbit:g}",
            str(row.num_hosts),
            row.contender,
            *(f"{seconds:.2f}" for seconds in times),
            f"{row.limit_s / row.exchange_s:.2f}",
            f"{peer.step_s / row.step_s:.2f}" if peer else "-",
        )
    return table


def draw(rows: Sequence[Row], directory: Path) -> None:
    """One chart a rate: seconds an exchange against hosts."""
    directory.mkdir(parents=True, exist_ok=True)
    for rate_mbit in sorted({row.rate_mbit for row in rows}):
        series = []
        for contender in CONTENDERS:
            found = sorted((r for r in rows if r.key[::2] == (rate_mbit, contender.name)), key=lambda r: r.num_hosts)
            if found:
                points = [(row.num_hosts, row.exchange_s) for row in found]
                limits = [(row.num_hosts, row.limit_s) for row in found]
                series.append(Series(contender.name, points, limits))
        title = f"Seconds an exchange, links of {rate_mbit:g} Mbit/s"
        chart = line_chart(series, title=title, x_label="hosts, a worker each", y_label="seconds an exchange")
        (directory / f"network-{rate_mbit:g}mbit.svg").write_text(chart, encoding="utf-8")


def load(path: Path | None, *, model: str) -> dict[tuple[float, int, str], Row]:
    """The rows of earlier runs, none if there is no such file.

    Raises:
        SystemExit: they exchanged another model's gradients.
    """
    if path is None or not path.exists():
        return {}
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["model"] != model:
        raise SystemExit(f"{path} holds rows of {report['model']}, not of {model}; give another --json")
    rows = [Row(**row) for row in report["rows"]]
    return {row.key: row for row in rows}


def to_mbit(bytes_per_s: float) -> float:
    return bytes_per_s * 8 / 1e6


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def in_order(rows: Mapping[tuple[float, int, str], Row]) -> list[Row]:
    names = [contender.name for contender in CONTENDERS]
    return sorted(rows.values(), key=lambda row: (row.rate_mbit, row.num_hosts, names.index(row.contender)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="sizes of the network")
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 1000], metavar="MBIT", help="Mbit/s of a link")
    parser.add_argument("--contenders", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--iterations", type=int, default=3, help="measured steps, after one that warms up")
    parser.add_argument("--congestion", default=CONGESTION_CONTROL, metavar="NAME", help="TCP's congestion control")
    parser.add_argument("--model", default="resnet18", help="whose gradients are exchanged")
    parser.add_argument("--json", type=Path, help="keep the numbers here")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw time against hosts, one SVG a rate")
    parser.add_argument("--no-measurement", action="store_true", help="only show and draw what the JSON file holds")
    args = parser.parse_args()
    if min(args.hosts) < 2 or max(args.hosts) > 200:
        parser.error("--hosts: a network has 2 to 200 hosts")
    rows = load(args.json, model=args.model)
    report = {"model": args.model, "num_bytes": gradient_bytes(args.model), "torch": torch.__version__}
    report["machine"] = describe_machine()

    def keep(row: Row) -> None:
        rows[row.key] = row
        if args.json:
            report["rows"] = [asdict(row) for row in in_order(rows)]
            args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    for num_hosts in [] if args.no_measurement else args.hosts:
        chosen = [c for c in CONTENDERS if c.name in args.contenders]
        if num_hosts == 2 and {"ps-bsp, 2 servers", "ps-bsp, n servers"} <= set(args.contenders):
            chosen = [c for c in chosen if c.name != "ps-bsp, 2 servers"]  # it is the other
        with network(num_hosts, congestion=args.congestion) as net:
            ray = net.start_ray() if any(contender.strategy for contender in chosen) else ""
            for rate_mbit in args.rates:
                for row in measure(net, ray, rate_mbit, chosen, model=args.model, num_steps=args.iterations):
                    keep(row)
    Console(width=TABLE_WIDTH).print(table_of(in_order(rows)))
    print(json.dumps({**report, "rows": [asdict(row) for row in in_order(rows)]}))
    if args.figures:
        draw(in_order(rows), args.figures)


if __name__ == "__main__":
    main()
