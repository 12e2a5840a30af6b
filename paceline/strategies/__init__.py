"""Strategies by the names of the command line."""

import importlib.metadata
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from paceline import pieces
from paceline.correction import ControlVariates, Proximal
from paceline.errors import UsageError, unknown
from paceline.lateness import Buffered
from paceline.outer import FedAdagrad, FedAdam, FedYogi, Momentum, Nesterov
from paceline.privacy import Central
from paceline.roster import Poisson
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Strategy, option_docs
from paceline.strategies.federated import Federated
from paceline.strategies.gossip import AsynchronousGossip, Gossip
from paceline.strategies.gossip.outer_step import OuterStep
from paceline.strategies.gossip.push_sum import PushSum
from paceline.strategies.gossip.relay import Relay
from paceline.strategies.horovod import Horovod
from paceline.strategies.local_updates import LocalUpdates
from paceline.strategies.parameter_server import ParameterServer
from paceline.strategies.quorum import QuorumUpdates
from paceline.strategies.single import Single
from paceline.topology import Chain, OnePeerExponential, RandomPairs


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A name of the command line: a strategy with some options fixed."""

    name: str
    strategy: type[Strategy]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The defaults of options whose default under this name is another than the strategy's own."""
    leaves_out: tuple[str, ...] = ()
    """Options that have no effect with those that are fixed."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Options that make no sense under this name, with the reason."""
    summary: str = ""
    alias_of: str | None = None

    @property
    def is_another_name(self) -> bool:
        """Whether it is an alias of what is the same unless options say otherwise, as `ps-sync` is."""
        return self.alias_of is not None and build(self.name) == build(self.alias_of)

    @property
    def docs(self) -> dict[str, tuple[Any, str]]:
        """The options a user may set, with default and documentation."""
        hidden = {*self.fixed, *self.leaves_out, *self.refuses}
        docs = option_docs(self.strategy).items()
        return {name: (self.defaults.get(name, own), doc) for name, (own, doc) in docs if name not in hidden}

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(self.docs)


_SYNCHRONOUS, _ASYNCHRONOUS = ("backup_workers", "combine"), ("torn_reads", "staleness")
_BSP = {"consistency": "bsp"}
_ASP = {"consistency": "asp"}
_OF_CODECS = ("codec_scope", "consensus_step")
_OF_OUTER = ("outer",)
_ALTERNATING = ("alternates", "private_epochs")

STRATEGIES: dict[str, Entry] = {}
"""Every strategy by its name on the command line."""


def register(entry: Entry) -> None:
    """Give a strategy a name for `build`, `paceline compare`, the planner and reports.

    A package does the same for the command line with an entry point of the group `paceline.strategies`.

    Raises:
        UsageError: the name is taken by another strategy.
    """
    if STRATEGIES.setdefault(entry.name, entry) != entry:
        raise UsageError(f"there is a strategy {entry.name!r} already: {STRATEGIES[entry.name].summary}")


for _entry in (
    Entry(
        name="single",
        strategy=Single,
        refuses={"codec": "exchanges nothing that could be coded; use it with more workers under all-reduce"},
        summary="one worker, no exchange: the baseline",
    ),
    Entry(
        name="all-reduce", strategy=AllReduce, summary="gradients averaged among workers in buckets, during backward"
    ),
    Entry(
        name="ring",
        strategy=AllReduce,
        fixed={"algorithm": "ring"},
        summary="all-reduce with algorithm=ring",
        alias_of="all-reduce",
    ),
    Entry(
        name="ps-bsp",
        strategy=ParameterServer,
        fixed=_BSP,
        leaves_out=_ASYNCHRONOUS,
        summary="parameter server, bulk synchronous: one update a clock, with the mean of all gradients",
    ),
    Entry(
        name="ps-sync",
        strategy=ParameterServer,
        fixed=_BSP,
        leaves_out=_ASYNCHRONOUS,
        summary="the same as ps-bsp",
        alias_of="ps-bsp",
    ),
    Entry(
        name="central-storage",
        strategy=ParameterServer,
        fixed=_BSP,
        leaves_out=_ASYNCHRONOUS,
        refuses={"servers": "has one server; use ps-bsp for more"},
        summary="ps-bsp with one server",
        alias_of="ps-bsp",
    ),
    Entry(
        name="ps-ssp",
        strategy=ParameterServer,
        fixed={"consistency": "ssp"},
        leaves_out=_SYNCHRONOUS,
        summary="parameter server, stale synchronous: nobody runs more than `staleness` clocks ahead",
    ),
    Entry(
        name="ps-asp",
        strategy=ParameterServer,
        fixed=_ASP,
        leaves_out=(*_SYNCHRONOUS, "staleness"),
        summary="parameter server, asynchronous: every gradient is applied on arrival, nobody waits",
    ),
    Entry(
        name="ps-async",
        strategy=ParameterServer,
        fixed=_ASP,
        leaves_out=(*_SYNCHRONOUS, "staleness"),
        summary="the same as ps-asp",
        alias_of="ps-asp",
    ),
    Entry(name="gossip", strategy=Gossip, summary="models mixed with those of neighbours; nobody hears everybody"),
    Entry(
        name="d-psgd",
        strategy=Gossip,
        fixed={"mode": "average"},
        leaves_out=_OF_OUTER,
        summary="gossip with the weighted mean of the neighbours' models",
        alias_of="gossip",
    ),
    Entry(
        name="sgp",
        strategy=Gossip,
        fixed={"mode": "push-sum"},
        defaults={"topology": OnePeerExponential()},
        leaves_out=(*_OF_OUTER, *_OF_CODECS),
        refuses={"codec": PushSum.why_uncoded},
        summary="gossip by push-sum, over links that need not go both ways",
        alias_of="gossip",
    ),
    Entry(
        name="relay",
        strategy=Gossip,
        fixed={"mode": "relay"},
        defaults={"topology": Chain()},
        leaves_out=("order", *_OF_OUTER, *_OF_CODECS),
        refuses={"codec": Relay.why_uncoded},
        summary="gossip in which models travel along a tree, so that all count alike",
        alias_of="gossip",
    ),
    Entry(
        name="noloco",
        strategy=Gossip,
        fixed={"mode": "outer"},
        defaults={"topology": RandomPairs(), "every": 50},
        leaves_out=("quasi_global", *_OF_CODECS),
        refuses={"codec": OuterStep.why_uncoded},
        summary="rounds of local steps, then an outer step with momentum in random pairs: nobody waits for all",
        alias_of="gossip",
    ),
    Entry(
        name="ad-psgd",
        strategy=AsynchronousGossip,
        refuses={"codec": "takes the mean with whom it meets, who has not heard what others were told; use gossip"},
        summary="gossip in pairs, while gradients are computed: nobody waits for a slower worker",
    ),
    Entry(name="local-sgd", strategy=LocalUpdates, summary="rounds of local steps, then parameters are averaged"),
    Entry(
        name="post-local",
        strategy=LocalUpdates,
        defaults={"post_local_from": 1000},
        summary="local-sgd whose first rounds have one step each",
    ),
    Entry(
        name="slowmo",
        strategy=LocalUpdates,
        defaults={"outer": Momentum()},
        summary="rounds of local steps, then an outer step with heavy-ball momentum",
    ),
    Entry(
        name="des-loc",
        strategy=LocalUpdates,
        defaults={"momentum_every": 3, "variance_every": 6},
        summary="local-sgd in which the optimizers' moments are averaged, too, each after rounds of its own",
    ),
    Entry(
        name="diloco",
        strategy=LocalUpdates,
        defaults={"outer": Nesterov()},
        summary="rounds of local steps, then an outer step with Nesterov momentum; in fragments if asked for",
    ),
    Entry(
        name="async-diloco",
        strategy=QuorumUpdates,
        summary="diloco over servers that step with what the first workers have changed: nobody waits for all",
    ),
    Entry(
        name="fed-avg",
        strategy=Federated,
        leaves_out=_ALTERNATING,
        summary="clients with data of their own train in turn; what some of them changed is averaged each round",
    ),
    Entry(
        name="dp-fed-avg",
        strategy=Federated,
        defaults={"privacy": Central(), "weights": "equal", "sampler": Poisson()},
        leaves_out=_ALTERNATING,
        summary="fed-avg under differential privacy: clipped changes, noise, and what it costs",
    ),
    Entry(
        name="fed-prox",
        strategy=Federated,
        defaults={"correction": Proximal()},
        leaves_out=_ALTERNATING,
        summary="fed-avg whose clients are drawn back to where their turn began",
    ),
    Entry(
        name="fed-avgm",
        strategy=Federated,
        defaults={"outer": Momentum(momentum=0.9)},
        leaves_out=_ALTERNATING,
        summary="fed-avg with heavy-ball momentum on the server",
    ),
    *(
        Entry(
            name=outer.name,
            strategy=Federated,
            defaults={"outer": outer},
            leaves_out=_ALTERNATING,
            summary=f"fed-avg with an adaptive server: {text}",
        )
        for outer, text in (
            (FedAdam(), "a running mean of squares"),
            (FedYogi(), "a running mean that squares change by their size alone"),
            (FedAdagrad(), "the sum of all squares"),
        )
    ),
    Entry(
        name="scaffold",
        strategy=Federated,
        fixed={"correction": ControlVariates()},
        defaults={"weights": "equal"},
        leaves_out=("private", *_ALTERNATING),
        summary="fed-avg whose clients follow the mean client's direction, by control variates that they keep",
    ),
    Entry(
        name="fed-nova",
        strategy=Federated,
        fixed={"normalise": True},
        leaves_out=_ALTERNATING,
        summary="fed-avg in which clients that take more steps do not count more",
    ),
    Entry(
        name="fed-bn",
        strategy=Federated,
        fixed={"private": "norm"},
        leaves_out=_ALTERNATING,
        summary="fed-avg whose clients keep their normalisation layers",
    ),
    Entry(
        name="fed-rep",
        strategy=Federated,
        fixed={"alternates": True},
        defaults={"private": "last"},
        summary="fed-avg whose clients keep their last layer, and train it first in each turn",
    ),
    Entry(
        name="fed-buff",
        strategy=Federated,
        defaults={"sampler": Buffered(), "weights": "equal"},
        leaves_out=_ALTERNATING,
        summary="fed-avg without waiting: clients begin when others are through, and late changes count less",
    ),
    Entry(
        name="horovod",
        strategy=Horovod,
        leaves_out=("nonfinite",),
        refuses={"codec": "leaves to the script what moves; use hvd.Compression there"},
        summary="a script of Horovod's, which exchanges by itself; its steps are recorded",
    ),
):
    register(_entry)
for _point in importlib.metadata.entry_points(group="paceline.strategies"):
    try:
        register(_point.load())
    except Exception as error:  # whatever is broken there, everything else is to work
        warnings.warn(f"the strategy {_point.name!r} of {_point.value} cannot be loaded: {error!r}", stacklevel=1)


def build(text: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy of a text as `NAME` or `NAME:OPTION=VALUE:...`, with further options, whose values may be text.

    `topology.rows` is an option of the piece that the option `topology` names.

    Raises:
        UsageError: there is no such strategy or option, with near misses; or no such value, or an option comes twice.
    """
    name, *settings = text.strip().split(":")
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    entry = STRATEGIES[name]
    written = pieces.parse_options(settings, where=f"strategy {text!r}:")
    for key in written.keys() & (options or {}).keys():
        raise UsageError(f"strategy {text!r}: {key} is given twice")
    hints = get_type_hints(entry.strategy)
    given: dict[str, Any] = {}
    of_pieces: dict[str, dict[str, Any]] = {}
    asked = {**written, **(options or {})}
    for key, value in asked.items():
        option, dot, own = key.partition(".")
        if option in entry.refuses:
            raise UsageError(f"{name} has no option {option}: it {entry.refuses[option]}")
        if option not in entry.options or (dot and pieces.piece_in(hints[option]) is None):
            of_piece = [f"{each}.{key}" for each in entry.options if pieces.takes(hints[each], asked.get(each), key)]
            raise unknown(f"option for {name}", key, entry.options, meant=of_piece)
        if dot:
            of_pieces.setdefault(option, {})[own] = value
        else:
            given[key] = value
    for option in {**given, **of_pieces}:
        kind = pieces.piece_in(hints[option])
        value = given.get(option, entry.docs[option][0])
        if kind is None:
            given[option] = pieces.read_value(option, value, hints[option])
        elif value is None and option in of_pieces:
            raise UsageError(f"{option}.{next(iter(of_pieces[option]))} needs {option}=NAME, which it is an option of")
        elif isinstance(value, str):
            given[option] = pieces.read(kind, value, of_pieces.get(option))
        elif option in of_pieces:
            given[option] = pieces.read(kind, value.name, {**pieces.settings_of(value), **of_pieces[option]})
    return entry.strategy(**{**entry.fixed, **entry.defaults, **given})


def settings_of(strategy: Strategy) -> dict[str, str]:
    """The options that are not as by default under the strategy's name, as texts that `build` takes."""
    settings: dict[str, str] = {}
    for key, (default, _) in STRATEGIES[name_of(strategy)].docs.items():
        value = getattr(strategy, key)
        if value == default:
            continue
        if not isinstance(value, pieces.Piece):
            settings[key] = pieces.text_of(value)
            continue
        settings[key] = pieces.name_of(value)
        settings |= {f"{key}.{own}": text for own, text in pieces.settings_of(value).items()}
    return settings


def name_of(strategy: Strategy) -> str:
    """The command line's name for a strategy: of the entries that fit, the first that says most of its options.

    A strategy that nobody has registered goes by its class.
    """
    fitting = [
        entry
        for entry in STRATEGIES.values()
        if type(strategy) is entry.strategy
        and not entry.is_another_name
        and all(getattr(strategy, key) == value for key, value in entry.fixed.items())
        and not any(getattr(strategy, key) is None for key in entry.defaults)
    ]
    if not fitting:
        return type(strategy).__name__
    return max(fitting, key=lambda entry: len(entry.fixed) + _num_alike(entry, strategy)).name


def _num_alike(entry: Entry, strategy: Strategy) -> int:
    """Options for which the entry has a default of its own, and the strategy not the general one but its like; less
    those for which it has something of another kind."""
    general = option_docs(entry.strategy)
    values = {key: getattr(strategy, key) for key in entry.defaults}
    return sum(
        value != general[key][0] if type(value) is type(entry.defaults[key]) else -1 for key, value in values.items()
    )
