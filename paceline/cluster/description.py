"""A cluster as the simulation sees it: hosts, links, how long computing takes, and where servers go."""

import math
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from paceline.errors import UsageError

Distribution = Literal["constant", "log-normal", "exponential", "trace"]
Placement = Literal["separate", "with workers"]
_SHARE_TOLERANCE = 1e-3


def setting(
    doc: str, default: Any = MISSING, *, least: float | None = None, above: float | None = None, compare: bool = True
) -> Any:
    """A key of a cluster's file with its documentation and bounds; `compare`: clusters that differ in it are different
    ones."""
    return field(default=default, compare=compare, metadata={"doc": doc, "least": least, "above": above})


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts that are all alike: one `[[hosts]]` table."""

    name: str = setting("what they are called; a number is added", "host")
    count: int = setting("how many there are", 1, least=1)
    cores: int = setting("of one host", 1, least=1)
    devices: int = setting("accelerators of one host", 0, least=0)
    gflop_per_s: float | None = setting(
        "what one core, or one device where there are some, does of this kind of work: for counted step times",
        None,
        above=0,
    )
    speed: float = setting("how fast they compute, relative to what [compute] says", 1.0, above=0)
    workers: int | None = setting(
        "workers that one host takes; 0: servers only; by default one, or as many as it has devices", None, least=0
    )
    bandwidth_gbit_per_s: float = setting("of the network card, each way", above=0)
    up_gbit_per_s: float | None = setting("of the network card, sending, where that differs", None, above=0)
    latency_us: float = setting("from one of these hosts to another of the same rack, one way", 50.0, least=0)
    burst_kbyte: float = setting("that the network card lets pass at once after a silence, each way", 0.0, least=0)
    memory_gbyte_per_s: float = setting("at which a server updates, and workers of one host exchange", 20.0, above=0)
    row_gbyte_per_s: float | None = setting(
        "at which a core picks rows of tables out, updates them and puts them back; none: memory_gbyte_per_s",
        None,
        above=0,
    )
    site: str = setting("which of the [[sites]] they are at", "")
    preemptions_per_hour: float = setting("that one of them is taken away, by whoever lends it", 0.0, least=0)
    notice_s: float = setting("between word that it will be taken away and that", 0.0, least=0)
    back_after_s: float | None = setting(
        "after a failure or a preemption, until it or one like it is there; none: never", None, least=0
    )
    price_per_hour: float = setting("of one of them, in any currency", 0.0, least=0)
    spot_price_per_hour: float | None = setting(
        "of one of them while it may be taken away; without preemptions it costs price_per_hour", None, least=0
    )

    def __post_init__(self) -> None:
        if self.notice_s and not self.preemptions_per_hour:
            raise UsageError("notice_s is of preemptions: give preemptions_per_hour, too")
        if self.spot_price_per_hour is not None and not self.preemptions_per_hour:
            raise UsageError("spot_price_per_hour is of hosts that are taken away: give preemptions_per_hour, too")

    @property
    def slots(self) -> int:
        return max(1, self.devices) if self.workers is None else self.workers

    @property
    def row_bytes_per_s(self) -> float:
        return (self.row_gbyte_per_s or self.memory_gbyte_per_s) * 1e9

    @property
    def paid_per_hour(self) -> float:
        return self.price_per_hour if self.spot_price_per_hour is None else self.spot_price_per_hour

    @property
    def worker_per_hour(self) -> float:
        """What a worker's part of one of them costs."""
        return self.paid_per_hour / self.slots


@dataclass(frozen=True, kw_only=True)
class Racks:
    """How hosts are cabled: `[racks]`. Without it, every host hangs on one switch that is never the bottleneck."""

    hosts: int = setting("in one rack", least=1)
    bandwidth_gbit_per_s: float = setting("between a rack and the core, each way", above=0)
    latency_us: float = setting("from one rack to another, one way, besides that of the hosts", 5.0, least=0)
    core_gbit_per_s: float | None = setting(
        "through the core, all racks together; none: it is never the bottleneck", None, above=0
    )


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place far from the others: one `[[sites]]` table."""

    name: str = setting("as hosts name it")
    bandwidth_gbit_per_s: float = setting("between the site and the others, each way", above=0)
    latency_ms: float = setting("one way, half of it; the other site's half is added", least=0)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How long a worker that has a host of speed 1 to itself computes: `[compute]`.

    With neither `step_s` nor `sample_s` the model's floating-point operations are counted, and hosts must say
    `gflop_per_s`.
    """

    step_s: float | None = setting("one step, with as many samples as the first one has", None, above=0)
    sample_s: float | None = setting("one sample, forward and backward", None, above=0)
    dispatch_us: float = setting(
        "of a core's time, that a framework takes for each operation of the forward pass, its gradient and update "
        "included; counts where operations are counted, as a measured time has it in",
        0.0,
        least=0,
    )
    backward_share: float = setting("of a step; the rest is the forward pass", 2 / 3, least=0)
    distribution: Distribution = setting("constant, log-normal, exponential or trace, around that time", "constant")
    variation: float | None = setting("standard deviation over mean, of log-normal", None, above=0)
    trace_s: tuple[float, ...] = setting("measured step times, which workers go through from places of their own", ())
    gradient_shares: tuple[float, ...] = setting(
        "of backward, what each parameter's gradient takes, in the optimizer's order; none: operations are counted", ()
    )
    pauses_per_hour: float = setting("of computing, on each worker: collected garbage, other users", 0.0, least=0)
    pause_s: float = setting("how long one takes", 0.0, least=0)
    failures_per_hour: float = setting(
        "of each host; who is on it dies, which ends a run without --elastic", 0.0, least=0
    )

    def __post_init__(self) -> None:
        if self.step_s is not None and self.sample_s is not None:
            raise UsageError("step_s and sample_s say the same; give one of them")
        if self.dispatch_us and not self.is_counted:
            raise UsageError(
                "dispatch_us counts where operations are counted, and step_s, sample_s and trace_s have it in"
            )
        if self.backward_share >= 1:
            raise UsageError(f"backward_share is a part of a step, below 1, not {self.backward_share}")
        if (self.variation is not None) != (self.distribution == "log-normal"):
            raise UsageError('variation goes with distribution = "log-normal", which needs it')
        if bool(self.trace_s) != (self.distribution == "trace"):
            raise UsageError('trace_s goes with distribution = "trace", which needs it')
        if any(not time_s > 0 for time_s in self.trace_s):
            raise UsageError("trace_s must be times above 0")
        if any(not share >= 0 for share in self.gradient_shares) or (self.gradient_shares and not self._is_whole()):
            raise UsageError("gradient_shares must be parts of backward, none below 0, that add up to 1")
        if bool(self.pauses_per_hour) != bool(self.pause_s):
            raise UsageError("pauses_per_hour and pause_s go together; give both")

    def _is_whole(self) -> bool:
        return abs(math.fsum(self.gradient_shares) - 1) < _SHARE_TOLERANCE

    def shares_of(self, num_parameters: int) -> tuple[float, ...]:
        """`gradient_shares`. Raises UsageError if the cluster was measured with a model of another number of
        parameters."""
        if self.gradient_shares and len(self.gradient_shares) != num_parameters:
            raise UsageError(
                f"the cluster's gradient_shares are of a model with {len(self.gradient_shares)} parameters, and this "
                f"one has {num_parameters}; probe with this script, or take gradient_shares out of its file"
            )
        return self.gradient_shares

    @property
    def is_counted(self) -> bool:
        """Whether operations are counted, for want of a time."""
        return self.reference_s is None and self.sample_s is None

    @property
    def reference_s(self) -> float | None:
        """Seconds of a whole step, where that is given; a trace's mean where nothing else is given."""
        if self.step_s is None and self.sample_s is None and self.trace_s:
            return math.fsum(self.trace_s) / len(self.trace_s)
        return self.step_s


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Where parameter servers go: `[servers]`."""

    placement: Placement = setting(
        '"separate": on hosts without workers; "with workers": one on each worker\'s host in turn', "separate"
    )
    request_us: float = setting("a server is at each request, besides the update", 0.0, least=0)
    row_request_us: float | None = setting(
        "a server is at a request about rows of tables, besides their bytes; none: request_us", None, least=0
    )

    @property
    def request_s(self) -> float:
        return self.request_us * 1e-6

    @property
    def row_request_s(self) -> float:
        return self.request_s if self.row_request_us is None else self.row_request_us * 1e-6


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What exchanges cost besides what passes the links: `[communication]`. Nothing, unless it says so."""

    operation_us: float = setting("a worker is at a collective operation, besides its hops", 0.0, least=0)
    operation_core_us: float = setting(
        "of a core's time that this takes; counts where hosts share cores, as message_core_us does", 0.0, least=0
    )
    hop_us: float = setting(
        "a tensor takes at least from one host to the next in a collective operation, however small it is; counts "
        "where hosts share no cores",
        0.0,
        least=0,
    )
    hop_core_us: float = setting(
        "of a core's time that it takes there, at both ends together; counts where hosts share cores, which are kept "
        "awake",
        0.0,
        least=0,
    )
    coding_us: float = setting(
        "of a core's time that each operation of a codec takes on a host of speed 1, besides its bytes", 0.0, least=0
    )
    message_us: float = setting("a worker is at sending another one a message", 0.0, least=0)
    further_message_us: float | None = setting(
        "a worker is at sending a message right after another one; none: message_us", None, least=0
    )
    request_us: float = setting("a worker is at asking its servers and taking what they answer", 0.0, least=0)
    message_core_us: float = setting(
        "of a core's time, at both ends, that a message from one worker to another takes; counts where hosts share "
        "cores, as request_core_us does",
        0.0,
        least=0,
    )
    further_message_core_us: float | None = setting(
        "of a core's time, at both ends, that a message takes which is sent right after another one; none: "
        "message_core_us",
        None,
        least=0,
    )
    request_core_us: float = setting(
        "of a core's time, at both ends, that a request to a server elsewhere and its answer take", 0.0, least=0
    )
    row_request_us: float | None = setting(
        "a worker is at asking its servers for rows of tables, or giving them gradients of rows, besides the rows' "
        "bytes; none: request_us",
        None,
        least=0,
    )
    row_request_core_us: float | None = setting(
        "of a core's time, as request_core_us, that a request about rows takes; none: request_core_us", None, least=0
    )
    row_request_variation: float = setting(
        "standard deviation over mean of what a request about rows takes either end, by chance", 0.0, least=0
    )
    packing_gbyte_per_s: float | None = setting(
        "at which a core encrypts and copies what goes to or comes from a server elsewhere; none: at once",
        None,
        above=0,
    )
    exchange_gbyte_per_s: float | None = setting(
        "at which a core does all that such bytes take at either end, looking at them and updates included; counts "
        "where hosts share cores, as other cores do most of it elsewhere; none: as packing",
        None,
        above=0,
    )
    unevenness: float = setting(
        "of connections that share a link: the standard deviation of the logarithm of what each gets; 0: all the same",
        0.0,
        least=0,
    )
    loss: float = setting(
        "part of the messages between neighbours that do not arrive, each by chance; what all-reduce, servers and "
        "ad-psgd send is sent again until it does",
        0.0,
        least=0,
    )

    def __post_init__(self) -> None:
        if self.loss >= 1:
            raise UsageError(f"loss is a part of the messages, below 1, not {self.loss}")
        if self.further_message_core_s > self.message_core_us * 1e-6:
            raise UsageError(
                f"further_message_core_us is of messages that take no longer than the first one, so at most "
                f"{self.message_core_us:g} (message_core_us), not {self.further_message_core_us:g}"
            )

    @property
    def further_message_s(self) -> float:
        return (self.message_us if self.further_message_us is None else self.further_message_us) * 1e-6

    @property
    def further_message_core_s(self) -> float:
        us = self.message_core_us if self.further_message_core_us is None else self.further_message_core_us
        return us * 1e-6

    @property
    def coding_s(self) -> float:
        return self.coding_us * 1e-6

    @property
    def request_s(self) -> float:
        return self.request_us * 1e-6

    @property
    def row_request_s(self) -> float:
        return self.request_s if self.row_request_us is None else self.row_request_us * 1e-6

    @property
    def row_request_core_s(self) -> float:
        us = self.request_core_us if self.row_request_core_us is None else self.row_request_core_us
        return us * 1e-6

    @property
    def packing_bytes_per_s(self) -> float:
        """Infinite where it takes no time."""
        return (self.packing_gbyte_per_s or math.inf) * 1e9

    @property
    def shared_core_bytes_per_s(self) -> float:
        """Bytes that one of the cores that hosts share sends or receives in a second; infinite: it takes no time."""
        return (self.exchange_gbyte_per_s or self.packing_gbyte_per_s or math.inf) * 1e9


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a run waits for while it gets over a failure, besides what the simulation moves by itself: `[recovery]`."""

    reform_s: float = setting("workers that are left, or that one joins, take to meet anew", 0.0, least=0)
    start_s: float = setting("a worker's process takes to start, where it joins or a run begins anew", 0.0, least=0)
    checkpoint_s: float = setting("a checkpoint keeps the workers from training", 0.0, least=0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A whole file."""

    about: str = setting("what it is, for people", "", compare=False)
    hosts: tuple[Hosts, ...] = setting("the [[hosts]] tables")
    racks: Racks | None = setting("the [racks] table", None)
    sites: tuple[Site, ...] = setting("the [[sites]] tables", ())
    compute: Compute = setting("the [compute] table", Compute())
    servers: Servers = setting("the [servers] table", Servers())
    communication: Communication = setting("the [communication] table", Communication())
    recovery: Recovery = setting("the [recovery] table", Recovery())
    shared_cores: int | None = setting(
        "that all hosts have together, where they are parts of one machine: each has one, and they take turns at them; "
        "none: hosts share none",
        None,
        least=1,
    )

    def __post_init__(self) -> None:
        if not self.hosts:
            raise UsageError("a cluster needs at least one [[hosts]] table")
        known = {site.name for site in self.sites}
        if len(known) < len(self.sites):
            raise UsageError("two [[sites]] have the same name")
        for hosts in self.hosts:
            if (hosts.site or known) and hosts.site not in known:
                raise UsageError(
                    f"hosts {hosts.name!r} are at site {hosts.site!r}, which is none of the [[sites]]: "
                    f"{', '.join(sorted(known)) or 'there are none'}"
                )
        if self.compute.is_counted and any(hosts.gflop_per_s is None and hosts.slots for hosts in self.hosts):
            raise UsageError(
                "give step_s or sample_s in [compute], or gflop_per_s in every [[hosts]] that takes workers"
            )

    @property
    def num_hosts(self) -> int:
        return sum(hosts.count for hosts in self.hosts)

    @property
    def num_slots(self) -> int:
        """Workers that it has room for."""
        return sum(hosts.count * hosts.slots for hosts in self.hosts)

    @property
    def can_fail(self) -> bool:
        """Whether hosts fail, or are taken away."""
        return self.compute.failures_per_hour > 0 or any(hosts.preemptions_per_hour for hosts in self.hosts)

    def each_host(self) -> list[Hosts]:
        return [hosts for hosts in self.hosts for _ in range(hosts.count)]

    def core_of(self, host: int) -> int:
        """The core that the host has, or shares with others."""
        return host % self.shared_cores if self.shared_cores is not None else host

    def names(self) -> list[str]:
        return [f"{hosts.name}-{number}" for hosts in self.hosts for number in range(hosts.count)]
