"""Some hosts joined by simulated links, for tests of what messages among them take."""

from __future__ import annotations

from collections.abc import Callable

from paceline.cluster.description import Cluster, Compute, Hosts
from paceline.engines.virtual.events import EventQueue
from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.network.wiring import Wiring

B = 125e6  # bytes per second of 1 Gb/s
M = 100e6  # bytes


class Bench:
    """Some alike hosts, and messages among them."""

    def __init__(
        self,
        num_hosts: int,
        *,
        latency_us: float = 0.0,
        chunk_bytes: float = 2**20,
        unevenness: float = 0.0,
        seed: int = 0,
    ) -> None:
        hosts = Hosts(count=num_hosts, bandwidth_gbit_per_s=1.0, latency_us=latency_us)
        self.timeline = EventQueue()
        self.topology = Wiring(Cluster(hosts=(hosts,), compute=Compute(step_s=1.0)))
        self.network = Network(self.timeline, self.topology, chunk_bytes=chunk_bytes, unevenness=unevenness, seed=seed)
        self.arrived: dict[object, float] = {}

    def send(self, source: int, destination: int, num_bytes: float, name: object) -> None:
        self.network.send(source, destination, num_bytes, self._note, name)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self.timeline.at(time_s, action)

    def run(self) -> float:
        self.timeline.run()
        return self.timeline.now_s

    def _note(self, name: object) -> None:
        self.arrived[name] = self.timeline.now_s
