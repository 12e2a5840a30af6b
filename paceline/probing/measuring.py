"""A probe from start to end: every host is spoken to, trains a little, and is measured."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, final

from paceline import durable
from paceline.cluster.description import Cluster
from paceline.cluster.writing import as_toml
from paceline.comm.wire import Keys
from paceline.config import DeviceChoice, RunConfig
from paceline.engines.ray import probes
from paceline.engines.ray.job import Job
from paceline.engines.ray.nodes import Node, chosen_address, connected, nodes
from paceline.engines.ray.supervisor import Supervisor
from paceline.engines.scripting import Program, Script, read_script
from paceline.engines.standing import Watcher
from paceline.errors import PacelineError, RunFailed, UsageError
from paceline.probing import fitting
from paceline.probing import step_times as steps
from paceline.probing import traffic as network
from paceline.records import EventRecord, read_records
from paceline.running.launch import own_environment

_DEADLINE_S = 60.0


class Audience(Protocol):
    """Who is told how a probe goes, and hears what the script prints."""

    def on_stage(self, number: int, count: int, what: str) -> None: ...

    def on_output(self, who: str, line: str) -> None: ...


@dataclass(frozen=True)
class ProbeConfig:
    """What is probed, and for how long."""

    script: Script
    num_steps: int = 50
    max_s: float = 10.0
    """Seconds after which training ends once enough steps are measured; all hosts train at the same time."""
    seed: int = 0
    device: DeviceChoice = "auto"


def config_for(
    script: str | Path, arguments: Sequence[str] = (), *, num_steps: int = 50, max_s: float = 10.0
) -> ProbeConfig:
    """Raises UsageError if the script cannot be read, or too few steps are asked for."""
    if num_steps < steps.MIN_STEPS:
        raise UsageError(f"--steps must be at least {steps.MIN_STEPS}, not {num_steps}")
    if not max_s > 0:
        raise UsageError(f"--max-time must be above 0, not {max_s:g}")
    return ProbeConfig(read_script(script, arguments), num_steps, max_s)


def probe(config: ProbeConfig, *, address: str | None, audience: Audience, insecure: bool = False) -> Cluster:
    """Measure a cluster of Ray, or this machine with a Ray of its own.

    Raises:
        RunFailed: a host does not answer, or the script fails; the message says which, and what to do.
        UsageError: the script does not train; or as `connected`.
    """
    with (
        connected(address, insecure=insecure),
        tempfile.TemporaryDirectory(prefix="paceline-probe-") as directory,
    ):
        audience.on_stage(1, 3, "speaking to every host")
        hosts = _answering_hosts(address, insecure=insecure)
        many = f"{len(hosts)} host(s)"
        environment = own_environment() if chosen_address(address) is not None else {}
        run = _Runs(Path(directory), config, environment, audience)
        audience.on_stage(2, 3, f"steps of {Path(config.script.path).name} on {many}, a worker each, without exchange")
        program = steps.MeasuredScript(config.script, config.num_steps, config.max_s)
        taken = [steps.read(report) for report in run("steps", program, len(hosts), device=config.device)]
        audience.on_stage(3, 3, f"the network of {many}" if len(hosts) > 1 else "the memory of 1 host")
        measuring = network.MeasuredNetwork(Keys.generate())
        reports = [network.read(report) for report in run("network", measuring, max(2, len(hosts)), device="cpu")]
        about = _about(config, hosts)
    known = {host.address: fitting.HostFacts(host.address, host.num_cpus, host.num_gpus) for host in hosts}
    order = [report.address for report in (taken if len(hosts) == 1 else reports)]
    by_address = {report.address: report for report in taken}
    return fitting.fit([known[name] for name in order], [by_address[name] for name in order], reports, about=about)


def write(cluster: Cluster, out: Path) -> None:
    """Write the file as a whole: what is there before stays until then. Raises RunFailed if it cannot be written."""
    try:
        with durable.whole(out) as partial:
            partial.write_text(as_toml(cluster), encoding="utf-8")
    except OSError as error:
        raise RunFailed(f"cannot write {out}: {error.strerror}; give another --out") from None


def require_writable(out: Path, *, force: bool) -> None:
    """Raises UsageError if there is such a file and it is not to be replaced, or its directory is not there."""
    if out.is_dir():
        raise UsageError(f"{out} is a directory; give a file as --out")
    if out.exists() and not force:
        raise UsageError(f"{out} exists; give another --out, or --force to replace it")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out} is in no directory that exists; make it, or give another --out")


def _answering_hosts(address: str | None, *, insecure: bool) -> list[Node]:
    for host in probes.probe(address, insecure=insecure):
        if host.problems:
            raise RunFailed(
                f"host {host.address}: {'; '.join(host.problems)}; `paceline doctor` looks again once this is mended"
            )
    hosts = nodes()
    addresses = [host.address for host in hosts]
    if len(set(addresses)) < len(addresses):
        raise UsageError(
            "two of Ray's nodes have one address, so nothing between them is a network; probe nodes on machines, "
            "containers or namespaces of their own"
        )
    return hosts


def _about(config: ProbeConfig, hosts: Sequence[Node]) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")  # noqa: TID251 - a date
    script = " ".join([Path(config.script.path).name, *config.script.arguments])
    text = f"Measured by paceline probe on {now} with {script}, on {', '.join(host.address for host in hosts)}."
    if len(hosts) == 1:
        return text + " One host: bandwidth and latency are those between two of its processes."
    return text


@final
class _Runs:
    """Runs programs that tell a report each, one worker a host."""

    def __init__(self, directory: Path, config: ProbeConfig, environment: dict[str, str], audience: Audience) -> None:
        self._directory, self._config, self._environment, self._audience = directory, config, environment, audience

    def __call__(self, name: str, program: Program, num_workers: int, *, device: DeviceChoice) -> list[dict[str, Any]]:
        """The reports, in rank order."""
        directory = self._directory / name
        directory.mkdir()
        config = RunConfig(seed=self._config.seed, device=device, deadline_s=_DEADLINE_S)
        job = Job(program, steps.Apart(), num_workers, config, environment=self._environment, is_spread=True)
        try:
            Supervisor(job, directory, _Ear(self._audience)).run()
        except UsageError as error:
            raise UsageError(f"cannot probe with {self._config.script.path}: {error}") from None
        except PacelineError as error:
            what = f"the script {self._config.script.path}" if name == "steps" else "measuring the network"
            raise RunFailed(f"probing ended in {what}: {error}") from None
        events = read_records(directory, EventRecord)
        found = {event.who: event.details for event in events if event.name == steps.EVENT}
        return [found[f"worker-{rank}"] for rank in range(num_workers)]


@final
@dataclass(frozen=True)
class _Ear(Watcher):
    """Hears what scripts print, and nothing else."""

    audience: Audience

    def on_output(self, who: str, line: str) -> None:
        self.audience.on_output(who, line)
