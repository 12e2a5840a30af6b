"""From what was measured to a cluster that the virtual engine simulates."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from paceline.cluster.description import Cluster, Communication, Compute, Hosts, Servers
from paceline.messages import FRAME_BYTES
from paceline.probing.bursts import BURST
from paceline.probing.step_times import StepReport
from paceline.probing.traffic import NetworkReport, PairReport

ALIKE = 0.15
"""Hosts whose numbers differ by less are described as one kind: two measurements of the same one do, too."""
_EVEN = 0.05
ASSUMED_INCAST = 0.5
"""Unevenness of connections from several hosts to one, where two hosts cannot show it: docs/prediction.md has why."""
MOST_HANDLING = 2.0
"""Times the processor time of packing. On slow links an exchange takes longer than that, since a core wakes up for each
packet; cores that are busy do so less: ResNet-18 with a server on each of 8 hosts on two cores took 1.8 times, and two
hosts alone 1.6 times at 1 Gbit/s and 12 to 16 times at 100 Mbit/s."""
_LEAST_BURST_S = 1e-3  # of the link's time: less than that is how measurements vary
_MAX_TRACE = 400
_BITS = 8
_DIGITS = 4


@dataclass(frozen=True)
class HostFacts:
    """What Ray says of a host."""

    address: str
    num_cpus: float
    num_gpus: float


def fit(
    hosts: Sequence[HostFacts], steps: Sequence[StepReport], network: Sequence[NetworkReport], *, about: str
) -> Cluster:
    """The cluster, from a `StepReport` and a `NetworkReport` a host, in rank order; of one host, from two ranks on
    it."""
    pairs = [pair for report in network for pair in report.pairs]
    is_one = len(hosts) == 1
    kinds = [_one_host(hosts[0], network, pairs)] if is_one else _each_host(hosts, steps, network, pairs)
    operation_s, hop_s = _parts(
        median(report.operation_s for report in network),
        median(report.lone_operation_s for report in network),
        num_hosts=len(hosts),
    )
    operation_core_s, hop_core_s = _parts(
        median(report.operation_core_s for report in network),
        median(report.lone_operation_core_s for report in network),
        num_hosts=len(hosts),
    )
    message_s = median(pair.message.message_s for pair in pairs)
    burst_s = median(pair.message.burst_s for pair in pairs)
    message_core_s = median(pair.message.message_core_s for pair in pairs)
    burst_core_s = median(pair.message.burst_core_s for pair in pairs)
    return Cluster(
        about=about,
        hosts=tuple(_merged(kinds)),
        compute=_compute(steps),
        servers=Servers(
            placement="with workers",
            request_us=_us(_request_s(pairs) / 2),
            row_request_us=_us(_row_request_s(pairs) / 2),
        ),
        communication=Communication(
            operation_us=_us(operation_s),
            operation_core_us=_us(operation_core_s),
            hop_us=_us(hop_s),
            hop_core_us=_us(hop_core_s),
            coding_us=_us(median(report.coding_s for report in network)),
            message_us=_us(max(0.0, median(pair.message.message_s - pair.latency_s for pair in pairs))),
            further_message_us=_us(_further_s(message_s, burst_s)),
            request_us=_us(_request_s(pairs) / 2),
            message_core_us=_us(message_core_s),
            further_message_core_us=_us(_further_s(message_core_s, burst_core_s)),
            request_core_us=_us(median(pair.exchange.request_core_s for pair in pairs)),
            row_request_us=_us(_row_request_s(pairs) / 2),
            row_request_core_us=_us(median(pair.exchange.row_request_core_s for pair in pairs)),
            row_request_variation=_rounded(_one_end(median(_row_request_variation(pair) for pair in pairs))),
            packing_gbyte_per_s=None if is_one else _rounded(_packing(network) / 1e9),
            exchange_gbyte_per_s=None if is_one else _rounded(_exchanged(network) / 1e9),
            unevenness=0.0 if is_one else _unevenness(network),
        ),
    )


def _compute(steps: Sequence[StepReport]) -> Compute:
    """Steps of all hosts together, each host's at the pace of the middle one."""
    means_s = [fmean(report.steps_s) for report in steps]
    reference_s = median(means_s)
    num_each = max(2, _MAX_TRACE // len(steps))
    trace_s = tuple(
        _rounded(step_s * reference_s / mean_s)
        for report, mean_s in zip(steps, means_s, strict=True)
        for step_s in report.steps_s[:num_each]
    )
    shares = [median(each) for each in zip(*(report.gradient_shares for report in steps), strict=True)]
    whole = sum(shares)
    return Compute(
        step_s=_rounded(reference_s),
        backward_share=min(0.99, _rounded(median(report.backward_share for report in steps))),
        distribution="trace",
        trace_s=trace_s,
        gradient_shares=tuple(round(share / whole, 6) for share in shares) if whole else (),
    )


def _one_host(host: HostFacts, network: Sequence[NetworkReport], pairs: Sequence[PairReport]) -> Hosts:
    """A host that has nobody to speak to; its bandwidth is that between two of its own processes."""
    shared = min(report.shared_bytes_per_s for report in network) * 2  # up to the first rank, and back
    memory = median(report.memory_bytes_per_s for report in network)
    cores, devices = _counts(host)
    return Hosts(
        name="host",
        cores=cores,
        devices=devices,
        workers=devices or cores,
        bandwidth_gbit_per_s=_gbit(median(_carried(pair) for pair in pairs)),
        latency_us=_us(median(pair.latency_s for pair in pairs)),
        memory_gbyte_per_s=_rounded(min(shared, memory) / 1e9),
        row_gbyte_per_s=_rounded(median(report.row_bytes_per_s for report in network) / 1e9),
    )


def _each_host(
    hosts: Sequence[HostFacts],
    steps: Sequence[StepReport],
    network: Sequence[NetworkReport],
    pairs: Sequence[PairReport],
) -> list[Hosts]:
    means_s = [fmean(report.steps_s) for report in steps]
    reference_s = median(means_s)
    found = []
    for rank, host in enumerate(hosts):
        # A way is as fast as the slower of its two ends; the best one shows this end.
        up = max(_carried(pair) for pair in pairs if pair.source == rank)
        down = max(_carried(pair) for pair in pairs if pair.destination == rank)
        cores, devices = _counts(host)
        found.append(
            Hosts(
                name="host",
                cores=cores,
                devices=devices,
                speed=reference_s / means_s[rank],
                bandwidth_gbit_per_s=_gbit(down),
                up_gbit_per_s=_gbit(up),
                latency_us=_us(median(p.latency_s for p in pairs if rank in (p.source, p.destination))),
                burst_kbyte=_burst_bytes([p for p in pairs if p.source == rank], _packing(network)) / 1e3,
                memory_gbyte_per_s=network[rank].memory_bytes_per_s / 1e9,
                row_gbyte_per_s=network[rank].row_bytes_per_s / 1e9,
            )
        )
    return found


def _burst_bytes(pairs: Sequence[PairReport], packing_bytes_per_s: float) -> float:
    """What a piece after a silence was ahead of the link's rate, packing left out."""

    def ahead_s(pair: PairReport) -> float:
        alone_s = pair.piece_s - 2 * FRAME_BYTES / packing_bytes_per_s
        return FRAME_BYTES / _carried(pair) - max(0.0, alone_s)

    burst_s = median(ahead_s(pair) for pair in pairs)
    return burst_s * median(_carried(pair) for pair in pairs) if burst_s >= _LEAST_BURST_S else 0.0


def _packing(network: Sequence[NetworkReport]) -> float:
    return median(report.packing_bytes_per_s for report in network)


def _exchanged(network: Sequence[NetworkReport]) -> float:
    """Packing and more, but not without bounds: other programs' interrupts may have been counted."""
    measured = median(pair.exchange.bytes_per_core_s for report in network for pair in report.pairs)
    packing = _packing(network)
    return min(packing, max(measured, packing / MOST_HANDLING))


def _carried(pair: PairReport) -> float:
    """What a way lets through: whichever sockets get less have their processes to blame."""
    return max(pair.bytes_per_s, pair.pushed_bytes_per_s)


def _merged(kinds: Sequence[Hosts]) -> list[Hosts]:
    """Those that are alike as one table with the median of each number; others by themselves, and numbered."""
    groups: list[list[Hosts]] = []
    for host in kinds:
        group = next((group for group in groups if _are_alike(group[0], host)), None)
        if group is None:
            groups.append([host])
        else:
            group.append(host)
    merged = []
    for number, group in enumerate(groups):

        def middle(what: Callable[[Hosts], float], group: Sequence[Hosts] = group) -> float:
            return median(what(host) for host in group)

        down, up = middle(lambda h: h.bandwidth_gbit_per_s), middle(lambda h: h.up_gbit_per_s or h.bandwidth_gbit_per_s)
        if _are_close(up, down):
            down, up = median([up, down]), 0.0
        merged.append(
            Hosts(
                name="host" if len(groups) == 1 else f"kind-{number}-host",
                count=len(group),
                cores=group[0].cores,
                devices=group[0].devices,
                speed=1.0 if len(groups) == 1 else _rounded(middle(lambda h: h.speed)),
                workers=group[0].workers,
                bandwidth_gbit_per_s=_rounded(down),
                up_gbit_per_s=_rounded(up) if up else None,
                latency_us=_rounded(middle(lambda h: h.latency_us)),
                burst_kbyte=_rounded(middle(lambda h: h.burst_kbyte)),
                memory_gbyte_per_s=_rounded(middle(lambda h: h.memory_gbyte_per_s)),
                row_gbyte_per_s=_rounded(middle(lambda h: h.row_bytes_per_s) / 1e9),
            )
        )
    return merged


def _are_alike(one: Hosts, other: Hosts) -> bool:
    """Latency and memory, which vary most from one measurement to the next, do not tell hosts apart."""
    return (
        (one.cores, one.devices) == (other.cores, other.devices)
        and _are_close(one.speed, other.speed)
        and _are_close(one.bandwidth_gbit_per_s, other.bandwidth_gbit_per_s)
        and _are_close(one.up_gbit_per_s or 1.0, other.up_gbit_per_s or 1.0)
    )


def _are_close(one: float, other: float) -> bool:
    return abs(one - other) <= ALIKE * max(one, other)


def _parts(operation_s: float, lone_s: float, *, num_hosts: int) -> tuple[float, float]:
    """What an operation takes by itself, and for each of the hops that follow one another in it. What varies does not
    make it take less with others than without."""
    num_hops = 2 * (num_hosts - 1)
    own_s = min(lone_s, operation_s)
    return own_s, (operation_s - own_s) / num_hops if num_hops else 0.0


def _further_s(message_s: float, burst_s: float) -> float:
    """What each message of a burst takes but the first one, and no more than that."""
    return min(message_s, max(0.0, burst_s - message_s) / (BURST - 1))


def _request_s(pairs: Sequence[PairReport]) -> float:
    """What asking a server costs both ends together, besides the way there and back."""
    return max(0.0, median(pair.exchange.request_s - 2 * pair.latency_s for pair in pairs))


def _row_request_s(pairs: Sequence[PairReport]) -> float:
    """The same of asking about rows."""
    return max(0.0, median(pair.exchange.row_request_s - 2 * pair.latency_s for pair in pairs))


def _row_request_variation(pair: PairReport) -> float:
    """Of what such a request costs both ends together: the way, which was measured with it, hardly varies."""
    request_s = pair.exchange.row_request_s
    both_ends_s = request_s - 2 * pair.latency_s
    return pair.exchange.row_request_variation * request_s / both_ends_s if both_ends_s > 0 else 0.0


def _one_end(variation: float) -> float:
    """Of each of two ends that take as long as each other and vary by themselves, where this is that of both
    together."""
    return math.sqrt(2) * variation


def _unevenness(network: Sequence[NetworkReport]) -> float:
    """Between two hosts or from several to one, whichever is more; what is hardly uneven is even, which is simulated
    faster."""
    between = [report.unevenness for report in network if report.unevenness is not None]
    incast = [report.incast_unevenness for report in network if report.incast_unevenness is not None]
    unevenness = max(median(between or [0.0]), median(incast or [ASSUMED_INCAST]))
    return _rounded(unevenness) if unevenness >= _EVEN else 0.0


def _counts(host: HostFacts) -> tuple[int, int]:
    return max(1, int(host.num_cpus)), int(host.num_gpus)


def _gbit(bytes_per_s: float) -> float:
    return _rounded(bytes_per_s * _BITS / 1e9)


def _us(seconds: float) -> float:
    return _rounded(seconds * 1e6)


def _rounded(number: float) -> float:
    """The number to as many digits as a measurement deserves."""
    return float(f"{number:.{_DIGITS}g}")
