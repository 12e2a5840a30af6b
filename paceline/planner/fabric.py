"""A cluster's links as arrays: what each carries of an exchange, and how long that keeps it busy."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.description import Cluster
from paceline.engines.virtual.network.wiring import BYTES_PER_GBIT, MEMORY_LATENCY_S

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
"""Indices of hosts, racks, sites or ranks."""

KINDS = ("up", "down", "memory", "rack_up", "rack_down", "core", "site_up", "site_down", "packing", "machine")


@final
@dataclass(frozen=True)
class Loads:
    """Bytes on every link, or rates or times: cards and memories of hosts, cables of racks, the core, lines of sites,
    and the cores that pack messages for servers, of each host (`packing`) and of a machine that hosts share."""

    up: Floats
    down: Floats
    memory: Floats
    rack_up: Floats
    rack_down: Floats
    core: Floats
    site_up: Floats
    site_down: Floats
    packing: Floats
    machine: Floats

    def __add__(self, other: "Loads") -> "Loads":
        return Loads(*(getattr(self, kind) + getattr(other, kind) for kind in KINDS))

    def __mul__(self, factor: float) -> "Loads":
        return Loads(*(getattr(self, kind) * factor for kind in KINDS))


@dataclass(frozen=True)
class Busiest:
    """The link that an exchange keeps busy longest."""

    name: str
    num_bytes: float
    busy_s: float
    kind: str = ""
    """As `Loads` calls it."""
    number: int = 0
    """Index of the link's host, rack or site."""


@final
class Fabric:
    """The links of the virtual engine's `Wiring`, all of a kind in one array."""

    def __init__(self, cluster: Cluster) -> None:
        hosts = cluster.each_host()
        racks, sites = cluster.racks, cluster.sites
        self._names = cluster.names()
        self._site_names = [site.name for site in sites]
        self.num_hosts = len(hosts)
        self.rack_of: Numbers = np.arange(self.num_hosts) // (racks.hosts if racks is not None else self.num_hosts)
        numbers = {site.name: number for number, site in enumerate(sites)}
        self.site_of: Numbers = np.array([numbers.get(host.site, 0) for host in hosts], dtype=np.int64)
        self._groups = {"": np.arange(self.num_hosts), "rack_": self.rack_of, "site_": self.site_of}
        self._half_s = np.array([host.latency_us * 1e-6 / 2 for host in hosts])
        self._between_racks_s = racks.latency_us * 1e-6 if racks is not None else 0.0
        self._site_s = np.array([site.latency_ms * 1e-3 for site in sites] or [0.0])
        self.row_bytes_per_s = np.array([host.row_bytes_per_s for host in hosts])
        """At which each host's cores pick rows of tables out, and put them back."""
        self.burst_bytes = np.array([host.burst_kbyte * 1e3 for host in hosts])
        """Which each host's card lets pass at once after a silence, each way."""
        costs = cluster.communication
        num_racks = int(self.rack_of[-1]) + 1
        rack_rate = racks.bandwidth_gbit_per_s * BYTES_PER_GBIT if racks is not None else np.inf
        core_rate = np.inf
        if racks is not None and racks.core_gbit_per_s is not None:
            core_rate = racks.core_gbit_per_s * BYTES_PER_GBIT
        site_rates = np.array([site.bandwidth_gbit_per_s * BYTES_PER_GBIT for site in sites] or [np.inf])
        ups = [host.bandwidth_gbit_per_s if host.up_gbit_per_s is None else host.up_gbit_per_s for host in hosts]
        self.rates = Loads(
            up=np.array(ups) * BYTES_PER_GBIT,
            down=np.array([host.bandwidth_gbit_per_s for host in hosts]) * BYTES_PER_GBIT,
            memory=np.array([host.memory_gbyte_per_s for host in hosts]) * 1e9,
            rack_up=np.full(num_racks, rack_rate),
            rack_down=np.full(num_racks, rack_rate),
            core=np.array([core_rate]),
            site_up=site_rates,
            site_down=site_rates,
            packing=np.full(self.num_hosts, costs.packing_bytes_per_s),
            machine=np.array([costs.shared_core_bytes_per_s * (cluster.shared_cores or np.inf)]),
        )
        """Bytes per second."""

    @property
    def packing_bytes_per_s(self) -> float:
        """The rate of a lone message, which cores pack and unpack; a machine that hosts share does both."""
        return float(min(self.rates.packing[0], self.rates.machine[0] / 2))

    @cached_property
    def nothing(self) -> Loads:
        return Loads(*(np.zeros(len(getattr(self.rates, kind))) for kind in KINDS))

    def messages(self, sources: Numbers, destinations: Numbers, num_bytes: Floats | float) -> Loads:
        """The load of one message from each source to the destination in the same place."""
        sizes = np.broadcast_to(np.asarray(num_bytes, dtype=np.float64), sources.shape)
        found, leaving = {}, {}
        for kind, group_of in self._groups.items():
            here, there = group_of[sources], group_of[destinations]
            leaving[kind] = np.where(here != there, sizes, 0.0)
            for way, groups in (("up", here), ("down", there)):
                found[kind + way] = _summed(groups, leaving[kind], len(getattr(self.rates, kind + way)))
        memory = _summed(sources, sizes - leaving[""], self.num_hosts)
        unpacked = {"packing": self.nothing.packing, "machine": self.nothing.machine}
        return Loads(memory=memory, core=np.array([leaving["rack_"].sum()]), **found, **unpacked)

    def everyone_to_everyone(
        self, sources: Numbers, destinations: Numbers, num_bytes: float, *, is_packed: bool = False
    ) -> Loads:
        """The load of one message from every source to every destination; either may name a host several times.
        `is_packed`: cores encrypt and copy what leaves a host and what comes to one."""
        sends = np.bincount(sources, minlength=self.num_hosts).astype(np.float64)
        takes = np.bincount(destinations, minlength=self.num_hosts).astype(np.float64)
        found = {}
        for kind, group_of in self._groups.items():
            size = len(getattr(self.rates, f"{kind}up"))
            out, into = _summed(group_of, sends, size), _summed(group_of, takes, size)
            found[f"{kind}up"] = out * (takes.sum() - into) * num_bytes
            found[f"{kind}down"] = into * (sends.sum() - out) * num_bytes
        packing = found["up"] + found["down"] if is_packed else self.nothing.packing
        core, memory = np.array([found["rack_up"].sum()]), sends * takes * num_bytes
        return Loads(memory=memory, core=core, packing=packing, machine=np.array([packing.sum()]), **found)

    def latency_s(self, sources: Numbers, destinations: Numbers) -> Floats:
        """One way, from each source to the destination in the same place."""
        leaves_rack = self.rack_of[sources] != self.rack_of[destinations]
        here, there = self.site_of[sources], self.site_of[destinations]
        far_s = np.where(here != there, self._site_s[here] + self._site_s[there], 0.0)
        cards_s = self._half_s[sources] + self._half_s[destinations]
        total_s = cards_s + np.where(leaves_rack, self._between_racks_s, 0.0) + far_s
        return np.where(sources == destinations, MEMORY_LATENCY_S, total_s)

    def farthest_s(self, sources: Numbers, destinations: Numbers) -> Floats:
        """One way, from each source to its farthest destination."""
        kinds = np.stack([self.rack_of[destinations], self.site_of[destinations], self._half_s[destinations]], axis=1)
        some = destinations[np.unique(kinds, axis=0, return_index=True)[1]]
        found = np.zeros(len(sources))
        for destination in some.tolist():
            found = np.maximum(found, self.latency_s(sources, np.full_like(sources, destination)))
        return found

    def shares_per_s(self, sources: Numbers, destinations: Numbers) -> Floats:
        """Bytes per second of each message while all are under way and share links evenly."""
        counts = self.messages(sources, destinations, 1.0)
        rates = {kind: _divided(getattr(self.rates, kind), getattr(counts, kind)) for kind in KINDS}
        here, there = self.rack_of[sources], self.rack_of[destinations]
        near = np.minimum(rates["up"][sources], rates["down"][destinations])
        through = np.minimum(np.minimum(rates["rack_up"][here], rates["rack_down"][there]), rates["core"][0])
        own, other = self.site_of[sources], self.site_of[destinations]
        afar = np.minimum(rates["site_up"][own], rates["site_down"][other])
        found = np.minimum(near, np.where(here != there, through, np.inf))
        found = np.minimum(found, np.where(own != other, afar, np.inf))
        return np.where(sources == destinations, rates["memory"][sources], found)

    def busiest(self, loads: Loads) -> Busiest:
        best = Busiest("none", 0.0, 0.0)
        for kind in KINDS:
            amounts: Floats = getattr(loads, kind)
            times = amounts / getattr(self.rates, kind)
            number = int(np.argmax(times))
            if times[number] > best.busy_s:
                best = Busiest(self._name(kind, number), float(amounts[number]), float(times[number]), kind, number)
        return best

    def busy_s(self, loads: Loads, link: Busiest) -> float:
        if not link.kind:
            return 0.0
        return float(getattr(loads, link.kind)[link.number] / getattr(self.rates, link.kind)[link.number])

    def _name(self, kind: str, number: int) -> str:
        if kind in ("core", "machine"):
            return "the core" if kind == "core" else "the shared cores"
        if kind.startswith("rack"):
            return f"the cable of rack {number} ({kind.removeprefix('rack_')})"
        if kind.startswith("site"):
            return f"the line of site {self._site_names[number]} ({kind.removeprefix('site_')})"
        return f"{self._names[number]}'s {kind if kind in ('memory', 'packing') else f'card ({kind})'}"


def _summed(places: Numbers, amounts: Floats, size: int) -> Floats:
    """The sum at each of so many places."""
    return np.bincount(places, amounts, size).astype(np.float64)


def _divided(rates: Any, counts: Any) -> Floats:
    found: Floats = np.divide(rates, np.maximum(counts, 1.0))
    return found


@lru_cache(maxsize=8)
def fabric_of(cluster: Cluster) -> Fabric:
    """One for all predictions on the same cluster."""
    return Fabric(cluster)
