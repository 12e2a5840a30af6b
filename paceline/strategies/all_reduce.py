"""All-reduce: every worker updates its own copy with the mean of all gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor

from paceline.aggregate import MEAN, Aggregator
from paceline.codec import Auto, Codec
from paceline.comm.base import Timing
from paceline.errors import UsageError
from paceline.membership import Membership
from paceline.server.admission import AdmissionRule
from paceline.server.tables.storage import TableFiles
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer, option, require_choice
from paceline.strategies.bucketing import laid_out
from paceline.strategies.by_rows import moved_by_rows
from paceline.strategies.choosing import Choosing, LinkSpeed
from paceline.strategies.codec_choice import CodecChoice
from paceline.strategies.coding import (
    CODEC_DOC,
    SCOPE_DOC,
    Coding,
    Scope,
    require_averaging,
)
from paceline.strategies.exchange import averaging
from paceline.strategies.gradient_averaging import GradientAveraging
from paceline.strategies.joint import AGGREGATE_DOC, require_joint
from paceline.strategies.own_state import OwnState
from paceline.strategies.pass_ends import Passes
from paceline.strategies.repeated_averaging import RepeatedAveraging
from paceline.strategies.replica import (
    Replica,
    cannot_evaluate,
    is_skipped_by_scaler,
    require_dense_steps,
    require_same_parameters,
)
from paceline.strategies.rows_beside import ROWS_DOC, SERVERS_DOC, RowRule, RowsBeside, require_rows_beside, rule_of
from paceline.strategies.served_rows import ROW_STALENESS_DOC
from paceline.strategies.table_files import DIR_DOC, MBYTES_DOC, require_table_files, table_files
from paceline.strategies.traits import AllReduced, Traits

Algorithm = Literal["auto", "ring", "tree", "halving-doubling", "reduce-broadcast", "all-to-all", "naive-ring"]


@final
@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """Synchronous data parallelism without servers.

    Gradients lie in flat buckets, in reverse order of use. A bucket is averaged over all workers as soon as backward
    has filled it, while backward goes on (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2); every worker then
    takes the same optimizer step. Unlike there, a bucket carries one flag a parameter, so that a parameter that no
    worker used in a step keeps `grad=None`.
    Of `nn.Embedding(sparse=True)` the rows of all workers' batches move, and not the table.

    The rows of tables, which are no parameters, lie on `servers`, where there are any.

    >>> AllReduce(bucket_mb=1).traits.lock_step
    True
    """

    algorithm: Algorithm = option(
        "auto",
        "auto: the fastest for the world at hand; to compare, over send and receive: ring, tree, halving-doubling, "
        "reduce-broadcast, all-to-all or naive-ring",
    )
    bucket_mb: float | Literal["auto"] = option(
        "auto", "size of a gradient bucket in MB; the first one is at most 1 MB; auto: as measured at the start"
    )

    codec: Codec | None = option(None, CODEC_DOC)
    codec_scope: Scope = option("links", SCOPE_DOC)
    aggregate: Aggregator = option(MEAN, AGGREGATE_DOC)
    servers: int = option(0, SERVERS_DOC)
    rows: RowRule | None = option(None, ROWS_DOC)
    table_dir: str | None = option(None, DIR_DOC)
    table_mbytes: float | None = option(None, MBYTES_DOC)
    row_staleness: int = option(0, ROW_STALENESS_DOC)

    def validate(self) -> None:
        require_choice("codec_scope", self.codec_scope, get_args(Scope))
        require_averaging(self.codec, self.codec_scope)
        if self.codec is not None and self.algorithm != "auto":
            raise UsageError(f"a codec has a way of its own to average; leave out algorithm={self.algorithm}")
        require_choice("algorithm", self.algorithm, get_args(Algorithm))
        if self.bucket_mb != "auto" and not 0 < self.bucket_mb <= 1024:
            raise UsageError(f"bucket_mb must be auto, or above 0 and at most 1024, not {self.bucket_mb}")
        if not self.aggregate.streams and (self.codec is not None or self.algorithm != "auto"):
            raise UsageError(f"aggregate={self.aggregate} has a way of its own; leave out codec and algorithm")
        require_table_files(self.table_dir, self.table_mbytes)
        require_rows_beside(self.servers, self.rows, self.table_dir, self.row_staleness, self.aggregate)

    def check(self, *, num_workers: int) -> None:
        require_joint(self.aggregate, num_workers)

    @property
    def behind_backward(self) -> bool:
        """Whether exchanges run behind backward; those over send and receive, coded and robust ones run when they
        are waited for."""
        averages = self.aggregate.streams and (self.codec is None or self.codec.adapts)
        return self.algorithm == "auto" and averages

    @property
    def traits(self) -> Traits:
        moved = AllReduced(
            algorithm=self.algorithm,
            bucket_mb=self.bucket_mb,
            behind_backward=self.behind_backward,
            codec=self.codec,
            codec_scope=self.codec_scope,
            has_flags=True,
            row_staleness=self.row_staleness,
            joins_rows=self.rows != "asp",
            moves_rows=self._takes_rows,
        )
        has_servers = self.servers > 0
        return Traits(
            lock_step=True,
            tells_stop=True,
            repeats_steps=not (self.aggregate.remembers or has_servers),
            joins_by_mean=self.aggregate.streams,
            passes_attacks=not has_servers,
            num_servers=self.servers,
            holds_rows=has_servers,
            serves_rows_alone=has_servers,
            traffic=(moved,),
        )

    def admission_rule(self, members: Membership) -> AdmissionRule | None:
        return rule_of(self.rows, members) if self.servers else None

    def admission_rule_beside(self, members: Membership) -> AdmissionRule:
        return rule_of(self.rows, members)

    def table_files(self) -> TableFiles | None:
        return table_files(self.table_dir, self.table_mbytes)

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        if self.algorithm != "auto" and not context.collective.can_receive_first:
            # In every algorithm ranks receive from each other before they send: over NCCL they would hang.
            raise UsageError(f"algorithm={self.algorithm} is not for NCCL; use algorithm=auto, or --device cpu")
        if self._moves_rows(context):
            replica = replace(replica, by_rows=moved_by_rows(replica))
        require_dense_steps(replica)
        return _AllReduceSynchronizer(self, context, replica)

    def _moves_rows(self, context: Context) -> bool:
        """Whether of gradients that have few rows these move, as honest workers have them."""
        return self._takes_rows and context.hostility is None and context.recovery is None

    @property
    def _takes_rows(self) -> bool:
        """Whether they do where all workers stay: joined by the mean, once."""
        return self.codec is None and self.aggregate == MEAN


@final
class _AllReduceSynchronizer(Synchronizer):
    def __init__(self, strategy: AllReduce, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._nonfinite = strategy.nonfinite
        average = averaging(context.collective, strategy.algorithm)
        layout, buffer, self.facts = laid_out(
            context,
            replica,
            bucket_mb=strategy.bucket_mb,
            behind_backward=strategy.behind_backward,
            exchange=lambda flat: average(flat)(),
        )
        self._choice = CodecChoice(strategy.codec, strategy.codec_scope, partial(_watch, replica))
        self._may_choose = isinstance(strategy.codec, Auto)
        coding = self._choice.begin(context)
        self.facts = self._choice.told(self.facts)
        self._gradients = (
            GradientAveraging(strategy, self, layout, buffer, coding)
            if context.recovery is None
            else RepeatedAveraging(strategy, self, layout, buffer, coding, self._choice, context.recovery)
        )
        self._rows: RowsBeside | None = None
        if strategy.servers and replica.is_first:
            self._rows = RowsBeside(
                context,
                replica,
                rows=strategy.rows,
                row_staleness=strategy.row_staleness,
                nonfinite=strategy.nonfinite,
            )

    @property
    def timings(self) -> tuple[Timing, ...]:
        own = (self.context.collective.timing, *self._gradients.timings)
        return own if self._rows is None else (*own, self._rows.timing)

    @property
    def passes(self) -> Passes:
        return self._gradients.passes

    @property
    def owes(self) -> bool:
        return self._gradients.owes

    def set_weight(self, weight: float) -> None:
        if self._rows is not None:
            self._rows.set_weight(weight)
        self._gradients.set_weight(weight)

    def set_synchronizing(self, on: bool) -> bool:
        return self._gradients.set_synchronizing(on)

    def rejoin(self, context: Context, *, facts: Mapping[str, float | str] | None = None) -> None:
        assert isinstance(self._gradients, RepeatedAveraging)
        self.context = context
        self.facts = self.facts if facts is None else facts
        self._gradients.rejoin(facts)
        self.facts = self._choice.told(self.facts)

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self._rows is not None:
            raise cannot_evaluate(self.replica.optimizer)
        return partial(self._evaluate, closure)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        gradients = self._gradients
        gradients.begin_evaluation()
        loss = closure()
        gradients.require_exchange()
        if gradients.is_nonfinite:  # half a step cannot be left out
            raise gradients.non_finite()
        if loss is None:
            return None
        own = loss.detach() if isinstance(loss, Tensor) else loss
        mean = torch.tensor(float(own) * gradients.weight, dtype=torch.float64, device=self.context.device)
        self.context.collective.all_reduce(mean, op="mean").wait()
        return torch.full_like(own, mean.item()) if isinstance(own, Tensor) else mean.item()

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        gradients = self._gradients
        require_same_parameters(self.replica)
        if not (gradients.is_exchanged or self.gradients_are_spent):
            gradients.require_exchange()
        if self._rows is not None and self._rows.is_nonfinite(step=self.iteration + 1):
            gradients.is_nonfinite = True
        before, optimizer = self.iteration, self.replica.optimizer
        if getattr(optimizer, "found_inf", None) is not None and is_skipped_by_scaler(optimizer):
            update()
        elif gradients.is_nonfinite and self._nonfinite == "raise":
            raise gradients.non_finite()
        elif gradients.is_update_complete and not gradients.is_nonfinite:
            update()
            self.iteration += 1
        if self._rows is not None:
            self._rows.push(is_void=self.iteration == before, pause_at=pause_at)
        self.has_updated = gradients.is_update_complete
        stop = gradients.end_step()
        if self._may_choose:
            self._take_up_codec()
        return tuple.__new__(StepOutcome, (self.iteration, stop, 0 if self.iteration > before else -1, True, False))

    def _take_up_codec(self) -> None:
        """Encode with the codec that `auto` has chosen, if it has just chosen one."""
        if self.context.recovery is None:  # otherwise choosing is a part of what is repeated
            self._choice.look()
        if not self._choice.has_found:
            return
        if (coding := self._choice.take_up()) is not None:
            self._gradients.code(coding)
        self.facts = self._choice.told(self.facts)

    def leave(self) -> None:
        if self._rows is not None:
            self._rows.leave()

    def own_state(self) -> dict[str, OwnState]:
        return self._gradients.own_state()

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        super().restore(state, own, iteration=iteration)
        self._gradients.restore(own)

    def close(self) -> None:
        self._gradients.close()


def _watch(replica: Replica, auto: Auto, context: Context, coding: Coding) -> Choosing:
    num_bytes = sum(spec.num_bytes for spec in replica.specs)
    speed = LinkSpeed(context, among_hosts=coding.among_hosts, num_bytes=num_bytes)
    return Choosing(auto, context, partial(speed.average_s, shapes=[spec.shape for spec in replica.specs]))
