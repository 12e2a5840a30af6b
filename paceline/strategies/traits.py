"""What a strategy declares about itself: planner, probe, lab and engines read this, and ask for no class or name."""

import math
from dataclasses import dataclass, replace
from typing import Literal, final

from paceline.codec import Codec
from paceline.roster import Participation
from paceline.topology import Topology

Unit = Literal["update", "gradient", "round"]
"""What an iteration is, as the literature counts: an update with the mean of the workers' gradients, one gradient that
is applied, or a round of local steps."""


@final
@dataclass(frozen=True, kw_only=True)
class AllReduced:
    """All workers average something as large as the gradients among themselves."""

    algorithm: str = "auto"
    bucket_mb: float | Literal["auto"] = "auto"
    behind_backward: bool = False
    """Each bucket leaves as soon as backward has filled it."""
    every: int = 1
    """Steps from one exchange to the next."""
    codec: Codec | None = None
    codec_scope: Literal["links", "all"] = "links"
    has_flags: bool = False
    """What workers tell one another of the values goes with them: by itself, and first, where a codec encodes these."""
    fragments: int = 1
    """Parts that are about as large as one another, and are exchanged one after the other within these steps."""
    delay: int = 0
    """Steps that workers go on while a part is under way."""
    num_besides: float = 0.0
    """As large tensors that are averaged after each exchange, on the mean of all, not coded and not hidden."""
    row_staleness: int = 0
    """Where servers hold rows of tables, further steps for which a worker uses one that it has asked for."""
    joins_rows: bool = True
    """All workers' gradients of rows then make one update, not one each."""
    moves_rows: bool = False
    """Rows of a weight of `nn.Embedding(sparse=True)` move, and not the whole gradient: every worker gets those that
    any batch has gradients of. They move after all else, where nobody may leave or join."""

    @property
    def is_in_fragments(self) -> bool:
        return self.fragments > 1 or self.delay > 0


@final
@dataclass(frozen=True, kw_only=True)
class Served:
    """Every worker pushes something as large as the gradients to the servers, and pulls as much."""

    staleness: float | None = None
    """Clocks that a worker may run ahead of the slowest; None: all wait for one update a clock."""
    backup_workers: int = 0
    """Pushes of a clock that nobody waits for."""
    quorum: int | None = None
    """Pushes that make an update, whosesoever they are; later ones count in the next. None: each by itself where there
    is a staleness, else one of every worker whose push is waited for."""
    grace_s: float = 0.0
    """How long an update waits for further pushes once it has its quorum."""
    every: int = 1
    """Steps from one exchange to the next."""
    codec: Codec | None = None
    """Encodes what is pushed."""
    codec_scope: Literal["links", "all"] = "links"
    row_staleness: int = 0
    """Further steps for which a worker uses a row of a table that it has asked for."""
    moves_rows: bool = False
    """Rows of a weight of `nn.Embedding(sparse=True)` move, and not the whole: servers get those that a batch has
    gradients of, before all else, and workers get those that have changed, after it, where nobody may leave or join."""

    @property
    def is_bounded(self) -> bool:
        """Whether workers wait for slower ones at some distance, but not at every clock."""
        return self.staleness is not None and self.staleness < math.inf

    def among(self, num_workers: int) -> "Served":
        """As such with a staleness, where a quorum comes to each push by itself."""
        is_each = self.quorum == 1 < num_workers and not self.grace_s
        return replace(self, staleness=math.inf) if is_each else self

    def takes_some_of(self, num_workers: int) -> bool:
        """Whether an update is neither of everybody nor of one worker alone."""
        return self.staleness is None and self.quorum is not None and self.quorum < num_workers


@final
@dataclass(frozen=True, kw_only=True)
class Neighbouring:
    """Every worker sends something as large as the gradients to its neighbours, and waits for as much from them."""

    topology: Topology
    every: int = 1
    """Steps from one exchange to the next."""
    behind_computing: bool = False
    """It leaves before the gradient of its step is computed, and is waited for after that."""
    message_size: float = 1.0
    """The size of a message over that of the gradients, where these have 4 bytes an element."""
    codec: Codec | None = None
    codec_scope: Literal["links", "all"] = "links"
    """links: nothing is coded where all workers are on one host."""
    takes_means: bool = False
    """A worker's model becomes the mean with the topology's weights, so that plans know how fast models meet."""


@final
@dataclass(frozen=True, kw_only=True)
class ClientTurns:
    """In a round some of many clients train in turn on the workers, on samples of their own. Each sends something as
    large as the gradients to the server, on the first worker's host; all workers get the joint by an all-reduce."""

    participation: Participation
    codec: Codec | None = None
    """Encodes what a client sends."""
    num_besides: float = 0.0
    """As large tensors that travel beside it, both ways, not coded."""


Traffic = AllReduced | Served | Neighbouring | ClientTurns


@final
@dataclass(frozen=True, kw_only=True)
class Traits:
    """What holds for every run under a strategy."""

    lock_step: bool
    """No worker ends a step without every other, so that all are always at the same step."""
    unit: Unit = "update"
    tells_stop: bool = False
    """The exchange of a step carries a worker's wish to stop to all others. Otherwise workers pause now and then to
    agree on it."""
    shows_model: bool = False
    """Where every gradient is an iteration: after each of its steps a worker has the global model of that moment, so
    that it may be judged without a word to anybody."""
    workers_differ: bool = False
    """Each worker has a model of its own, whose distance to the mean is recorded with every evaluation."""
    own_scores: bool = False
    """Each worker then evaluates its own model, too."""
    missing_messages: str = ""
    """What becomes of a run whose messages between neighbours are lost, and what to use instead. Empty where the run
    goes on with what it has, or sends no such messages."""
    by_script: bool = False
    """The script itself exchanges, evaluates and saves, through the interface of another library; its steps are
    recorded, and it runs in real processes alone."""
    repeats_steps: bool = False
    """Workers that are left when others die can repeat the step among themselves."""
    outlives_workers: bool = False
    """Servers have the model, and go on without a worker that dies or leaves. Each worker then takes its own steps."""
    meets_anew: bool = False
    """Workers that are left when others die, or join, meet anew between two steps of their own, and go on. Each has its
    own part of the data."""
    joins_by_mean: bool = True
    """What workers send counts alike, with whatever else it is joined: an update is the same, but for rounding, if
    fewer workers compute all of it."""
    passes_attacks: bool = False
    """What a worker sends passes `Context.corrupt`, so that a study may have it attack."""
    num_clients: int = 0
    """Those whose contributions are joined, where these are others than the workers: an attack is then by clients."""
    holds_rows: bool = False
    """The rows of a model's tables (`paceline.nn.ShardedEmbedding`) have a place, and are updated with the model."""
    serves_rows_alone: bool = False
    """The servers hold such rows, and nothing else: workers own the model."""
    num_servers: int = 0
    """Servers that the engine has to place."""
    num_replicas: int = 0
    """Other servers that have a copy of what each one holds, and go on with it when that one dies."""
    num_ranges: int | None = None
    """Key ranges that the model is cut into, where servers have replicas; none: one a server."""
    traffic: tuple[Traffic, ...] | None = None
    """What moves how far and how often; an empty tuple if nothing does. None: not declared, so that plans refuse it."""
    untold: str = ""
    """Why it is not declared, as what the strategy does."""

    @property
    def when_elastic(self) -> "Traits":
        """What holds where workers may die or leave: under servers those who are left take what others have not done,
        and so some take more steps."""
        return replace(self, lock_step=False) if self.outlives_workers else self

    @property
    def survives(self) -> bool:
        """Whether a run goes on without a worker that dies."""
        return self.repeats_steps or self.has_lanes

    @property
    def has_lanes(self) -> bool:
        """Whether each worker of an elastic run takes its own steps, on a part of an epoch that is its own."""
        return self.outlives_workers or self.meets_anew

    @property
    def is_for_ray_alone(self) -> bool:
        """Whether nothing but real processes can show what it does."""
        return self.by_script or self.num_replicas > 0

    @property
    def servers_own_model(self) -> bool:
        return self.num_servers > 0 and not self.serves_rows_alone

    @property
    def takes_equal_steps(self) -> bool:
        """Whether workers need one another until the last step, so that all are to have as many batches."""
        return self.lock_step or (self.is_synchronous and not self.num_servers)

    @property
    def takes_first_comers(self) -> bool:
        """Whether servers make an iteration of the contributions that come first, so that some are left behind."""
        return self.is_synchronous and self.num_servers > 0 and not self.lock_step

    @property
    def averages_gradients(self) -> bool:
        """Whether an iteration joins workers' gradients, rather than what each has trained by itself."""
        return self.unit == "update" and (self.lock_step or self.num_servers > 0)

    @property
    def trains_apart(self) -> bool:
        """Whether an iteration is a round in which workers have trained by themselves, on their own data."""
        return self.unit == "round" and not self.num_clients

    @property
    def is_synchronous(self) -> bool:
        """Whether an iteration joins what many workers computed, rather than one of them."""
        return self.unit != "gradient"

    @property
    def exchanges_nothing(self) -> bool:
        return not self.traffic and self.num_servers == 0

    def exchanges_as(self, other: "Traits") -> bool:
        """Whether a script that wants that one's way to exchange has it here, too, whatever the number of servers."""
        return (self.is_synchronous, self.lock_step, self.num_servers > 0, bool(self.traffic)) == (
            other.is_synchronous,
            other.lock_step,
            other.num_servers > 0,
            bool(other.traffic),
        )
