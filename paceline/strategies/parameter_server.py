"""Parameter servers: workers push gradients to and pull parameters from a group of servers that own the model."""

import math
from dataclasses import dataclass, replace
from typing import Literal, final, get_args

from paceline.aggregate import MEAN, Aggregator, MajorityVote
from paceline.codec import Codec, TensorCodec
from paceline.errors import UsageError
from paceline.membership import Membership
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.server.tables.storage import TableFiles
from paceline.strategies.base import Context, Strategy, Synchronizer, option, require_choice
from paceline.strategies.coding import CODEC_DOC, SCOPE_DOC, Scope, require_averaging
from paceline.strategies.combining import Mode
from paceline.strategies.joint import AGGREGATE_DOC, require_joint
from paceline.strategies.replica import Replica, require_dense_steps, require_no_closure, require_plain_steps
from paceline.strategies.served_rows import ROW_STALENESS_DOC, keeping_for, require_row_staleness
from paceline.strategies.served_weights import served_by_rows
from paceline.strategies.serving import ServerSynchronizer
from paceline.strategies.table_files import DIR_DOC, MBYTES_DOC, require_table_files, table_files
from paceline.strategies.traits import AllReduced, Served, Traits

Consistency = Literal["bsp", "ssp", "asp"]
DEFAULT_STALENESS = 3


@final
@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy):
    """A server group with the optimizer on the servers.

    Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014: contiguous key ranges, one
    a server. Unlike there, the vector is dense and ranges are balanced by bytes.

    - bsp: one update a clock with the mean of all workers' gradients; with `backup_workers` b, of the first n - b
      (Chen et al. 2016).
    - ssp: every gradient is an update; a worker runs at most `staleness` clocks ahead of the slowest (Ho et al. 2013).
    - asp: every gradient is an update; nobody waits.

    What the script does to gradients between backward and step (clipping, unscaling) concerns, under bsp, the mean of
    all workers' gradients: when the first step shows such a script, workers average their gradients among themselves
    before the script sees them (`combine=auto`). Under ssp and asp each worker's own gradient is what is applied, and
    so what the script sees.

    Of `nn.Embedding(sparse=True)` servers hold the rows; a worker sends gradients of its batch's, and takes those that
    have changed since.

    Raises (at bind): UsageError for optimizers that need a closure, or sparse gradients where whole ones move, or
    cannot be built anew.

    >>> ParameterServer(consistency="ssp", staleness=2).traits.num_servers
    1
    """

    consistency: Consistency = "bsp"
    servers: int = option(1, "number of servers, each owning one key range")
    replicas: int = option(0, "other servers that have a copy of each one's key range, and go on with it when it dies")
    ranges: int | None = option(
        None,
        "with replicas, key ranges of all servers together, of which those that join take some (default: one each)",
    )
    staleness: int | None = option(None, f"clocks a worker may run ahead of the slowest (default {DEFAULT_STALENESS})")
    backup_workers: int = option(0, "gradients of a clock that need not be waited for")
    torn_reads: bool = option(
        False, "workers on a server's host read parameters while the next update is made, so perhaps half-written ones"
    )
    combine: Mode = option(
        "auto", "average gradients among workers before the script sees them: auto (if it changes them), always, never"
    )

    codec: Codec | None = option(None, CODEC_DOC)
    codec_scope: Scope = option("links", SCOPE_DOC)
    aggregate: Aggregator = option(MEAN, AGGREGATE_DOC)
    table_dir: str | None = option(None, DIR_DOC)
    table_mbytes: float | None = option(None, MBYTES_DOC)
    row_staleness: int = option(0, ROW_STALENESS_DOC)

    def validate(self) -> None:
        require_choice("codec_scope", self.codec_scope, get_args(Scope))
        require_averaging(self.codec, self.codec_scope, of_servers=True)
        require_choice("consistency", self.consistency, get_args(Consistency))
        require_choice("combine", self.combine, get_args(Mode))
        if self.servers < 1:
            raise UsageError(f"servers must be at least 1, not {self.servers}")
        if self.replicas:
            self._require_replicable()
        if self.ranges is not None and not (self.replicas and self.ranges >= self.servers):
            raise UsageError(
                f"ranges={self.ranges} is for servers with replicas, each of which has at least one; give replicas=1 "
                f"or more, and ranges={self.servers} or more"
            )
        if self.staleness is not None and self.consistency != "ssp":
            raise UsageError(f"staleness has no effect under ps-{self.consistency}; use ps-ssp")
        if self.staleness is not None and self.staleness < 0:
            raise UsageError(f"staleness must be at least 0, not {self.staleness}")
        if self.consistency == "bsp" and self.torn_reads:
            raise UsageError("torn_reads has no effect under ps-bsp, where nothing is written while workers read")
        if self.consistency != "bsp" and (self.backup_workers or self.combine != "auto"):
            raise UsageError(f"backup_workers and combine have no effect under ps-{self.consistency}; use ps-bsp")
        if self.backup_workers and self.combine == "always":
            raise UsageError("combine=always waits for every worker, so backup_workers would have no effect")
        if self._votes:
            self._require_majority()
        if not self.aggregate.streams:
            self._require_comparable()
        require_table_files(self.table_dir, self.table_mbytes)
        require_row_staleness(self.row_staleness, staleness=self._staleness, rule=f"ps-{self.consistency}")

    def check(self, *, num_workers: int) -> None:
        require_joint(self.aggregator(), num_workers - self.backup_workers)
        if not 0 <= self.backup_workers < num_workers:
            raise UsageError(
                f"backup_workers={self.backup_workers} leaves no gradient to wait for with {num_workers} worker(s)"
            )

    @property
    def traits(self) -> Traits:
        served = Served(
            staleness=self._staleness,
            backup_workers=self.backup_workers,
            codec=self.codec,
            codec_scope=self.codec_scope,
            row_staleness=self.row_staleness,
            moves_rows=self._takes_rows,
        )
        return Traits(
            lock_step=self.consistency == "bsp" and self.backup_workers == 0,
            unit="update" if self.consistency == "bsp" else "gradient",
            tells_stop=True,
            shows_model=self.consistency != "bsp",
            num_servers=self.servers,
            num_replicas=self.replicas,
            num_ranges=self.ranges,
            outlives_workers=self._outlives_workers,
            joins_by_mean=self.aggregate.streams,
            passes_attacks=True,
            holds_rows=True,
            traffic=(AllReduced(), served) if self.combine == "always" else (served,),
        )

    def admission_rule(self, members: Membership) -> AdmissionRule:
        staleness = self._staleness
        if staleness is None:
            return BulkSynchronous(members, backup_workers=self.backup_workers)
        return StaleSynchronous(members, staleness=staleness, torn_reads=self.torn_reads)

    def aggregator(self) -> Aggregator:
        return MajorityVote() if self._votes else self.aggregate

    def codec_of_pushes(self) -> TensorCodec | None:
        assert self.codec is None or isinstance(self.codec, TensorCodec)  # others are refused
        return self.codec

    def table_files(self) -> TableFiles | None:
        return table_files(self.table_dir, self.table_mbytes, num_copies=self.replicas)

    def admission_rule_beside(self, members: Membership) -> AdmissionRule:
        """Under ssp the first optimizer's clocks keep workers together, and with them what every other one has done."""
        if self.backup_workers:
            raise UsageError(
                "with backup_workers each optimizer's servers would take other workers' gradients, and workers could "
                "wait for one another at different optimizers for ever; prepare one optimizer, or leave backup_workers "
                "out"
            )
        if self.replicas:
            raise UsageError(f"replicas={self.replicas} is for one optimizer so far; prepare one, or use replicas=0")
        if self._staleness is None:
            return BulkSynchronous(members)
        return StaleSynchronous(members, torn_reads=self.torn_reads)

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        if context.store is None:
            raise UsageError("this world has no servers; start the script with `paceline run --strategy ps-...`")
        require_no_closure(replica.optimizer)
        if self._moves_rows(context):
            replica = replace(replica, by_rows=served_by_rows(replica))
        require_dense_steps(replica)
        require_plain_steps(replica)
        if replica.tables:
            self._require_rows_joined_alike(context)
        for name in () if replica.tables else ("table_dir", "row_staleness"):
            if getattr(self, name):
                raise UsageError(f"{name}={getattr(self, name)} has no effect without a ShardedEmbedding; leave it out")
        if context.rounds is not None:
            self._require_summable(replica)
        is_synchronous = self.consistency == "bsp"
        return ServerSynchronizer(
            context,
            context.store,
            replica,
            nonfinite=self.nonfinite,
            is_weighted=is_synchronous,
            aggregator=self.aggregator(),
            combine=self.combine if is_synchronous else "never",
            is_partial=self.backup_workers > 0 or context.reform is not None,
            codec=self.codec_of_pushes(),
            codec_scope=self.codec_scope,
            keeping=keeping_for(self.row_staleness, staleness=self._staleness),
        )

    def _moves_rows(self, context: Context) -> bool:
        """Whether of gradients that have few rows these move, as honest workers have them."""
        return self._takes_rows and context.hostility is None and context.reform is None

    @property
    def _takes_rows(self) -> bool:
        """Whether they do where all workers stay: joined by the mean, on servers that live as long as the run, in
        updates whose workers have all taken as many steps."""
        return self.codec is None and self.aggregate == MEAN and not self.replicas and not self.backup_workers

    def _require_summable(self, replica: Replica) -> None:
        """An update's rounds are added up on the servers."""
        if self._votes:
            what = f"codec={self.codec} is joined by a vote of all workers, which rounds of some cannot make"
        elif replica.tables:
            what = "rows of a ShardedEmbedding are updated in each round"
        else:
            return
        raise UsageError(
            f"--global-batch keep: an update may take several rounds of those who are left, and {what}; use "
            "--global-batch grow"
        )

    def _require_rows_joined_alike(self, context: Context) -> None:
        """Rows of tables are joined by the mean, and come as honest workers send them."""
        if self._votes or self.aggregate != MEAN:
            what = f"codec={self.codec}" if self._votes else f"aggregate={self.aggregate}"
            raise UsageError(f"{what} does not join the rows of a ShardedEmbedding, of which servers take the mean")
        if context.hostility is not None:
            raise UsageError("attacks do not change what workers send for the rows of a ShardedEmbedding")

    @property
    def _outlives_workers(self) -> bool:
        """What a worker pushes counts whole or not at all."""
        return self.combine != "always" and not (self.backup_workers or self.torn_reads)

    @property
    def _votes(self) -> bool:
        return self.codec is not None and self.codec.votes

    def _require_majority(self) -> None:
        """Servers have the votes of several workers, and nothing but votes."""
        if self.consistency != "bsp":
            raise UsageError(
                f"codec={self.codec} is joined by a vote of all workers, and under ps-{self.consistency} each gradient "
                "is an update of its own; use ps-bsp"
            )
        if self.aggregate != MEAN:
            raise UsageError(f"codec={self.codec} is joined by a vote; leave out aggregate={self.aggregate}")
        if self.combine == "always":
            raise UsageError(f"combine=always averages gradients, and codec={self.codec} has nothing to vote on then")

    def _require_replicable(self) -> None:
        """Copies hold the model, its optimizer, and the clocks of rules that hold nothing else."""
        if not 0 < self.replicas < self.servers:
            raise UsageError(
                f"replicas={self.replicas} needs as many servers besides the first, and servers={self.servers}"
            )
        unfit = {"backup_workers": self.backup_workers > 0, "torn_reads": self.torn_reads}
        found = [name for name, is_set in unfit.items() if is_set]
        if found:
            raise UsageError(f"replicas={self.replicas} does not go with {found[0]} so far; leave one of them out")

    def _require_comparable(self) -> None:
        """Servers have several gradients of each update, and all of each where they compare whole ones."""
        aggregate = self.aggregate
        if self.consistency != "bsp":
            raise UsageError(
                f"aggregate={aggregate} compares the gradients of an update, and under ps-{self.consistency} each "
                "gradient is one; use ps-bsp"
            )
        if self.combine == "always":
            raise UsageError(f"combine=always averages gradients before aggregate={aggregate} could compare them")
        if self.servers > 1 and not aggregate.is_coordinate_wise:
            raise UsageError(
                f"aggregate={aggregate} compares whole gradients, of which each of {self.servers} servers has a part; "
                "use servers=1, or all-reduce, where workers add up what the parts tell"
            )
        if aggregate.remembers:
            raise UsageError(
                f"aggregate={aggregate} remembers what each worker has sent, which servers do not keep; use all-reduce"
            )

    @property
    def _staleness(self) -> float | None:
        """Clocks that a worker may run ahead of the slowest; None: all wait for one update a clock."""
        if self.consistency == "bsp":
            return None
        if self.consistency == "asp":
            return math.inf
        return DEFAULT_STALENESS if self.staleness is None else self.staleness
