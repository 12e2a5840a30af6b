"""All-reduce: every worker updates its own copy with the mean of all gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NoReturn, final, get_args

import torch
from torch import Tensor

from paceline.aggregate import MEAN, Aggregator
from paceline.buckets import MOST_RANKS, GradientBuckets, OutOfTurn
from paceline.codec import Auto, Codec
from paceline.comm.base import Finished, Timing, Work
from paceline.errors import NonFiniteGradient, PeerLost, UsageError
from paceline.membership import Membership
from paceline.messages import Raw, from_frames
from paceline.server.admission import AdmissionRule
from paceline.server.tables.storage import TableFiles
from paceline.strategies.base import Context, StepOutcome, Strategy, Synchronizer, non_finite, option, require_choice
from paceline.strategies.bucket_size import MIN_BYTES
from paceline.strategies.bucketing import allocated, cut, laid_out
from paceline.strategies.choosing import Choosing, LinkSpeed
from paceline.strategies.coding import CODEC_DOC, NOTHING_CODED, SCOPE_DOC, Scope, coding_of, require_averaging
from paceline.strategies.exchange import Exchange, averaging
from paceline.strategies.joint import AGGREGATE_DOC, require_joint
from paceline.strategies.meeting import gathered
from paceline.strategies.overlap import Overlap
from paceline.strategies.own_state import OwnState
from paceline.strategies.progress import Progress, require_same
from paceline.strategies.regrouping import ResultHandedOn
from paceline.strategies.repeating import Repeating
from paceline.strategies.replica import Replica, cannot_evaluate, is_skipped_by_scaler, require_same_parameters
from paceline.strategies.rows_beside import ROWS_DOC, SERVERS_DOC, RowRule, RowsBeside, require_rows_beside, rule_of
from paceline.strategies.table_files import DIR_DOC, MBYTES_DOC, require_table_files, table_files
from paceline.strategies.traits import AllReduced, Traits

_APART = 5  # what turns of two optimizers differ by

Algorithm = Literal["auto", "ring", "tree", "halving-doubling", "reduce-broadcast", "all-to-all", "naive-ring"]


@final
@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """Synchronous data parallelism without servers.

    Gradients lie in flat buckets, in reverse order of use. A bucket is averaged over all workers as soon as backward
    has filled it, while backward goes on (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2); every worker then
    takes the same optimizer step. Unlike there, a bucket carries one flag a parameter, so that a parameter that no
    worker used in a step keeps `grad=None`.

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
        require_rows_beside(self.servers, self.rows, self.table_dir, self.aggregate)

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
        )
        has_servers = self.servers > 0
        return Traits(
            lock_step=True,
            tells_stop=True,
            repeats_steps=self.algorithm == "auto"
            and self.codec is None
            and self.aggregate.streams
            and not has_servers,
            passes_attacks=not has_servers,
            num_servers=self.servers,
            holds_rows=has_servers,
            serves_rows_alone=has_servers,
            traffic=None if has_servers else (moved,),
            untold="moves rows of tables, whose number nobody knows" if has_servers else "",
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
        return _AllReduceSynchronizer(self, context, replica)


@final
class _AllReduceSynchronizer(Synchronizer):
    def __init__(self, strategy: AllReduce, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._nonfinite, self._behind_backward = strategy.nonfinite, strategy.behind_backward
        self._is_weighted = strategy.aggregate.streams
        average = averaging(context.collective, strategy.algorithm)
        layout, buffer, self.facts = laid_out(
            context,
            replica,
            bucket_mb=strategy.bucket_mb,
            behind_backward=strategy.behind_backward,
            exchange=lambda flat: average(flat)(),
        )
        self._layout = layout
        self._repeating = Repeating(context.recovery) if context.recovery is not None else None
        self._buckets = self._in_buckets(buffer)
        coding = coding_of(strategy.codec, strategy.codec_scope, context)
        self._choosing: Choosing | None = None
        if coding is None and strategy.codec is not None:
            self.facts = {**self.facts, "codec": NOTHING_CODED}
        elif coding is not None and isinstance(strategy.codec, Auto):
            scratch = buffer if buffer.numel() >= MIN_BYTES else context.collective.allocate(MIN_BYTES)
            links = LinkSpeed(
                context,
                among_hosts=coding.among_hosts,
                scratch=scratch,
                average=lambda flat: average(flat)(),
            )
            taken_s = partial(links.average_s, shapes=[spec.shape for spec in replica.specs])
            self._choosing = Choosing(strategy.codec, context, taken_s)
            self._coding, coding = coding, None
        elif coding is not None:
            self.facts = {**self.facts, "codec": str(coding.codec)}
        self._exchange = Exchange(
            context.collective,
            self._buckets.buckets,
            algorithm=strategy.algorithm,
            coding=coding,
            layout=layout,
            aggregator=strategy.aggregate,
        )
        self._overlap = Overlap(context.collective.timing, now_s=context.pacing.now_s)
        self._works: list[Work] = []
        self._looks_first = self._nonfinite != "allow" and not self._exchange.is_watched
        self._culprit: tuple[int, str] | None = None  # a rank, and a parameter whose gradient was not finite there
        self._is_nonfinite = False
        self._stop = False
        self._is_exchanged = False  # whether what has been accumulated for the next step is averaged
        self._num_exchanges = 0  # since the last step
        self._turn = 0  # what is the same on every rank in each of them
        self._weight = 1.0
        self._rows: RowsBeside | None = None
        if strategy.servers and replica.is_first:
            self._rows = RowsBeside(context, replica, rows=strategy.rows, nonfinite=strategy.nonfinite)

    def _in_buckets(self, buffer: Tensor) -> GradientBuckets:
        return GradientBuckets(
            self.replica.parameters,
            self._layout,
            buffer,
            on_bucket=self._on_bucket,
            on_backward_end=self._finish_backward,
        )

    @property
    def timings(self) -> tuple[Timing, ...]:
        own = (self.context.collective.timing, self._overlap.timing, self._exchange.timing)
        return own if self._rows is None else (*own, self._rows.timing)

    def set_weight(self, weight: float) -> None:
        if self._rows is not None:
            self._rows.set_weight(weight)
        if not self._is_weighted:
            return
        if self._repeating is None and weight != self._weight and not self._is_exchanged:
            # What was accumulated without an exchange is to count with its own batch's weight, not with this one.
            for parameter in self.replica.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._weight / weight)
        self._weight = weight

    def set_synchronizing(self, on: bool) -> bool:
        if self._repeating is not None:
            raise UsageError("--elastic repeats single batches: worker.no_sync() cannot be had with it so far")
        if not on:
            self._is_exchanged = False
        before, self._buckets.is_synchronizing = self._buckets.is_synchronizing, on
        return before

    def _on_bucket(self, bucket: int) -> None:
        """The bucket's gradients are final here: start to average them, and move the earlier ones on."""
        if bucket == 0:
            self._culprit = None
            self._num_exchanges += 1
            if self.context.size <= MOST_RANKS:
                self._turn = self._num_exchanges + self.progress().lead + _APART * self.number
        is_last = bucket == len(self._buckets.buckets) - 1
        culprit = self._buckets.find_nonfinite(bucket) if self._looks_first else None
        if culprit is not None:
            self._culprit = (self.context.rank, culprit)
        self._buckets.fill_flags(
            bucket, stop=is_last and self.stop_vote(), nonfinite=culprit is not None, turn=self._turn
        )
        if self._repeating is not None and self._keep(self._repeating, bucket):
            return
        if self._weight != 1.0:
            self._buckets.buckets[bucket].values.mul_(self._weight)
        if self.context.corrupt is not None:  # an attack looks at all gradients
            return
        try:
            self._works.append(self._exchange.start(bucket, step=self.iteration))
            if is_last:  # nothing is left to hide it
                return
            if self._behind_backward:
                self._overlap.begin()
            under_way = [work for work in self._works if not work.poll()]
        except PeerLost as lost:
            if self._repeating is None:
                raise
            self._repeating.lost = lost
            return
        if not under_way:
            self._overlap.end()

    def _finish_backward(self) -> None:
        """Wait for the averages; from here on `param.grad` is what the optimizer should see."""
        if self._repeating is not None:
            self._repeat(self._repeating)
        else:
            self._average()

    def _keep(self, repeating: Repeating, bucket: int) -> bool:
        """Keep the bucket's gradients; whether the others have to be regrouped before it is exchanged."""
        if bucket == 0 and self._num_exchanges > 1:
            raise UsageError("--elastic repeats single backward passes: call backward() once a step, or leave it out")
        repeating.keep(bucket, self._buckets)
        return repeating.lost is not None

    def _repeat(self, repeating: Repeating) -> None:
        """Average until no worker dies in it or joins, each time among those who are there."""
        while True:
            try:
                if repeating.lost is None:
                    self._average()
                    break
                self.rejoin(repeating.recovery.regroup())
                repeating.put_back(self._buckets)
                self._weight = repeating.recovery.weight
                self._num_exchanges, self._culprit, self._stop = 0, None, False
                for bucket in range(len(self._buckets.buckets)):
                    self._buckets.adopt(bucket)
                    self._on_bucket(bucket)
            except PeerLost as lost:
                repeating.lost = lost
            except ResultHandedOn as handed:
                self._take_over(repeating, handed.frames)
                repeating.lost = PeerLost("the others have gone on a step further, and wait for this worker")
                break
        if not self.context.collective.completes_alike:
            repeating.keep_result(self._buckets)
        is_nonfinite = repeating.commit(self._buckets, is_nonfinite=self._is_nonfinite)
        self._is_nonfinite = is_nonfinite

    def _take_over(self, repeating: Repeating, frames: Sequence[Raw]) -> None:
        """The others' averages become this worker's."""
        self._works.clear()
        self._buckets.close()
        # In other memory: what was under way may still write to the old one.
        self._buckets = self._in_buckets(torch.zeros(self._layout.num_bytes, dtype=torch.uint8))
        repeating.put_back(self._buckets)
        for bucket in range(len(self._buckets.buckets)):
            self._buckets.adopt(bucket)
            self._buckets.fill_flags(bucket, stop=False, nonfinite=False)
        from_frames(frames, [bucket.flat for bucket in self._buckets.buckets])
        self._works = [Finished()] * len(self._buckets.buckets)
        self._average()

    def rejoin(self, context: Context, *, facts: Mapping[str, float | str] | None = None) -> None:
        self.context = context
        if self._repeating is not None:
            self._repeating.lost = None
        if facts is not None:
            self.facts = facts
            if "bucket_mb" in facts:
                self._layout = cut(self.replica, round(float(facts["bucket_mb"]) * 1e6))
        self._works.clear()
        self._buckets.close()
        self._buckets = self._in_buckets(allocated(context, self._layout.num_bytes))
        self._exchange = Exchange(
            context.collective, self._buckets.buckets, layout=self._layout, timing=self._exchange.timing
        )
        self._looks_first = self._nonfinite != "allow" and not self._exchange.is_watched

    def _average(self) -> None:
        self._overlap.end()
        is_any_nonfinite = False
        if self.context.corrupt is not None:
            self.context.corrupt(self._buckets.views, self.iteration)
            self._works = [self._exchange.start(n, step=self.iteration) for n in range(len(self._buckets.buckets))]
        for bucket, work in enumerate(self._works):
            work.wait()
            try:
                is_nonfinite, stop = self._buckets.read_flags(bucket)
            except OutOfTurn:
                self._raise_disagreement()
            if self._nonfinite != "allow" and work.nonfinite is not None and self._culprit is None:
                rank = self.context.membership.ranks[work.nonfinite.rank]
                self._culprit = (rank, self._buckets.name_at(bucket, work.nonfinite.element))
            is_any_nonfinite = is_any_nonfinite or is_nonfinite or self._culprit is not None
            self._stop = self._stop or stop
        self._is_nonfinite = is_any_nonfinite and self._nonfinite != "allow"
        # What is not finite is applied by nobody, or was asked for; kept, it would come again in every later step.
        self._exchange.settle(is_applied=not is_any_nonfinite)
        self._works.clear()
        self._is_exchanged = True

    def evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self._rows is not None:
            raise cannot_evaluate(self.replica.optimizer)
        return partial(self._evaluate, closure)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if self._repeating is not None:
            raise UsageError("--elastic cannot repeat steps whose optimizer calls a closure; use another optimizer")
        self._is_exchanged = False
        loss = closure()
        self._require_exchange()
        if self._is_nonfinite and self._nonfinite != "allow":  # half a step cannot be left out
            raise self._non_finite()
        if loss is None:
            return None
        own = loss.detach() if isinstance(loss, Tensor) else loss
        mean = torch.tensor(float(own) * self._weight, dtype=torch.float64, device=self.context.device)
        self.context.collective.all_reduce(mean, op="mean").wait()
        return torch.full_like(own, mean.item()) if isinstance(own, Tensor) else mean.item()

    def _require_exchange(self) -> None:
        if not self._is_exchanged:
            # No backward pass of this step exchanged anything; the others may have: take part.
            self._buckets.flush()
            self._finish_backward()

    def _non_finite(self) -> NonFiniteGradient:
        rank, parameter = self._culprit or (self.context.rank, None)
        return non_finite(rank=rank, step=self.iteration + 1, parameter=parameter)

    def _raise_disagreement(self) -> NoReturn:
        """Name the ranks whose exchanges met out of turn. Collective call."""
        place = f"a backward pass of {self.title!r}" if self.title else "a backward pass"
        everyone = gathered(self.context.collective, place, [self._num_exchanges, *self.progress()])
        nums = [num_exchanges for num_exchanges, *_ in everyone]
        if len(set(nums)) == 1:
            require_same([Progress(*progress) for _, *progress in everyone])
        theirs = ", ".join(f"rank {rank} {num}" for rank, num in enumerate(nums))
        raise UsageError(
            f"step {self.iteration + 1}: backward passes since the last optimizer.step(): {theirs}; every rank must "
            "call backward() and step() as often as the others (with worker.no_sync() backward passes only accumulate)"
        )

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        require_same_parameters(self.replica)
        if not self.gradients_are_spent:
            self._require_exchange()
        if self._rows is not None and self._rows.is_nonfinite(step=self.iteration + 1):
            self._is_nonfinite = True
        before = self.iteration
        if is_skipped_by_scaler(self.replica.optimizer):
            update()
        elif self._is_nonfinite and self._nonfinite == "raise":
            raise self._non_finite()
        elif self._repeating is not None and not self._repeating.is_update_complete:
            pass  # what is there already waits for the rest of the update
        elif not self._is_nonfinite:
            update()
            self.iteration += 1
        if self._rows is not None:
            self._rows.push(is_void=self.iteration == before, pause_at=pause_at)
        self.has_updated = self._repeating is None or self._repeating.is_update_complete
        self._is_exchanged = self._is_nonfinite = False
        self._num_exchanges = 0
        if self._choosing is not None:
            self._choose(self._choosing)
        stop, self._stop = self._stop, False
        return StepOutcome(self.iteration, stop=stop, staleness=0 if self.iteration > before else -1)

    def _choose(self, choosing: Choosing) -> None:
        """Go on with a codec, if one is worth it."""
        outcome = choosing.step_ended()
        if outcome is None:
            return
        self.facts, self._choosing = {"codec": outcome.why}, None
        if outcome.codec is not None and self._coding is not None:
            coding = replace(self._coding, codec=outcome.codec, before=outcome.before)
            self._exchange = Exchange(
                self.context.collective,
                self._buckets.buckets,
                coding=coding,
                layout=self._layout,
                timing=self._exchange.timing,
            )
            self._behind_backward = False
            self._looks_first = self._nonfinite != "allow"

    def leave(self) -> None:
        if self._rows is not None:
            self._rows.leave()

    def own_state(self) -> dict[str, OwnState]:
        return self._exchange.own_state()

    def restore(self, state: dict[str, Tensor], own: Mapping[str, Tensor], *, iteration: int) -> None:
        super().restore(state, own, iteration=iteration)
        self._exchange.restore(own)

    def close(self) -> None:
        self._buckets.close()
