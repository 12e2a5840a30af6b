"""Parameter servers: workers push gradients to and pull parameters from a group of servers that own the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, final, get_args

import torch
from torch import Tensor

from paceline.buckets import GradientBuckets
from paceline.comm.base import Push, Reply, Store, Timing
from paceline.errors import UsageError
from paceline.layout import by_group
from paceline.membership import Membership
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.strategies.base import (
    Context,
    Replica,
    StepOutcome,
    Strategy,
    Synchronizer,
    non_finite,
    option,
    require_choice,
)
from paceline.strategies.replica import (
    hyperparameters,
    is_skipped_by_scaler,
    require_no_closure,
    require_no_hooks,
    require_plain_steps,
    require_same_parameters,
)

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

    Raises (at bind): UsageError for optimizers that need a closure or sparse gradients, or cannot be built anew.

    >>> ParameterServer(consistency="ssp", staleness=2).num_servers()
    1
    """

    summary: ClassVar[str] = "a server group owns the parameters and the optimizer; workers push and pull"

    consistency: Consistency = "bsp"
    servers: int = option(1, "number of servers, each owning one key range")
    staleness: int | None = option(None, f"clocks a worker may run ahead of the slowest (default {DEFAULT_STALENESS})")
    backup_workers: int = option(0, "gradients of a clock that need not be waited for")
    torn_reads: bool = option(
        False, "workers on a server's host read parameters while the next update is made, so perhaps half-written ones"
    )
    combine: Literal["auto", "always", "never"] = option(
        "auto", "average gradients among workers before the script sees them: auto (if it changes them), always, never"
    )

    def validate(self) -> None:
        require_choice("consistency", self.consistency, get_args(Consistency))
        require_choice("combine", self.combine, ("auto", "always", "never"))
        if self.servers < 1:
            raise UsageError(f"servers must be at least 1, not {self.servers}")
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

    def check(self, *, num_workers: int) -> None:
        if not 0 <= self.backup_workers < num_workers:
            raise UsageError(
                f"backup_workers={self.backup_workers} leaves no gradient to wait for with {num_workers} worker(s)"
            )

    def is_lock_step(self) -> bool:
        return self.consistency == "bsp" and self.backup_workers == 0

    def is_synchronous(self) -> bool:
        return self.consistency == "bsp"

    def num_servers(self) -> int:
        return self.servers

    def admission_rule(self, *, num_workers: int) -> AdmissionRule | None:
        members = Membership.first(num_workers)
        if self.consistency == "bsp":
            return BulkSynchronous(members, backup_workers=self.backup_workers)
        if self.consistency == "asp":
            staleness = math.inf
        else:
            staleness = DEFAULT_STALENESS if self.staleness is None else self.staleness
        return StaleSynchronous(members, staleness=staleness, torn_reads=self.torn_reads)

    def bind(self, context: Context, replica: Replica) -> Synchronizer:
        if context.store is None:
            raise UsageError("this world has no servers; start the script with `paceline run --strategy ps-...`")
        require_no_closure(replica.optimizer)
        require_plain_steps(replica)
        return _ParameterServerSynchronizer(self, context, context.store, replica)


@final
class _ParameterServerSynchronizer(Synchronizer):
    def __init__(self, strategy: ParameterServer, context: Context, store: Store, replica: Replica) -> None:
        self._strategy = strategy
        self._rank = context.rank
        self._collective = context.collective
        self._store = store
        self._replica = replica
        layout = by_group(replica.specs)
        self._parameters = _Mirror(store.allocate(layout.num_bytes), context.device)
        self._gradients = _Mirror(store.allocate(layout.num_bytes), context.device)
        views = layout.views(self._parameters.local)
        for parameter, view in zip(replica.parameters, views, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self._places = [view.data_ptr() for view in views]
        self._buckets = GradientBuckets(
            replica.parameters, layout, self._gradients.local, on_backward_end=self._finish_backward
        )
        # Under bsp the first step shows whether the script changes gradients; see ParameterServer.
        self._is_undecided = strategy.consistency == "bsp" and strategy.combine == "auto" and context.size > 1
        self._combines = (self._is_undecided and not strategy.backup_workers) or strategy.combine == "always"
        self._versions_seen: list[int] | None = None
        self._sums_seen: list[int] | None = None
        self._is_combined = False  # whether this step's gradients are the workers' mean by now
        self._culprit: str | None = None
        self._steps = 0
        self._weight = 1.0
        self._groups = hyperparameters(replica.optimizer)
        self._num_changes = self._count_changes()
        self._parameters.to_host()
        store.attach(layout, replica.optimizer_spec, self._parameters.host, self._gradients.host)

    @property
    def timings(self) -> tuple[Timing, ...]:
        return (self._store.timing, self._collective.timing)

    def set_weight(self, weight: float) -> None:
        is_averaged = self._combines and self._versions_seen is not None
        if self._strategy.consistency == "bsp" and weight != self._weight and not is_averaged:
            # What was accumulated without an exchange is to count with its own batch's weight, not with this one.
            is_changed_by_script = self._versions_seen != self._versions()
            for flat in self._buckets.flats:
                flat.mul_(self._weight / weight)
            if self._versions_seen is not None and not is_changed_by_script:
                self._versions_seen = self._versions()
        self._weight = weight

    def set_synchronizing(self, on: bool) -> bool:
        if not on:
            self._versions_seen = None
        before, self._buckets.is_synchronizing = self._buckets.is_synchronizing, on
        return before

    def step(self, update: Callable[[], object], *, pause_at: int) -> StepOutcome:
        self._steps += 1
        require_same_parameters(self._replica)
        require_no_hooks(self._replica.optimizer)
        self._require_unchanged()
        self._require_gradients()
        if self._is_undecided:
            self._decide()
        if self._combines and self._versions_seen is None:
            self._finish_backward()  # every backward pass of this step was under no_sync
        void = self._is_void()
        weight = 1.0 if self._is_combined else self._weight
        self._versions_seen = None
        self._is_combined = False
        self._gradients.to_host()
        groups = hyperparameters(self._replica.optimizer)
        changed = None if groups == self._groups else groups
        self._groups = groups
        return self._take(
            self._store.exchange(
                Push(pause_at=pause_at, void=void, stop=self.stop_vote(), groups=changed, weight=weight)
            )
        )

    def wait_for_admission(self, *, pause_at: int) -> StepOutcome:
        return self._take(self._store.wait_for_admission(pause_at=pause_at))

    def refresh(self) -> None:
        self._store.pull()
        self._parameters.to_device()
        self._num_changes = self._count_changes()

    def leave(self) -> None:
        self._store.leave()

    def optimizer_state(self) -> dict[str, Tensor]:
        return self._store.optimizer_state()

    def restore(self, state: dict[str, Tensor], *, iteration: int) -> None:
        self._parameters.to_host()
        self._store.load_state(state, iteration=iteration)

    def close(self) -> None:
        self._buckets.close()

    def _take(self, reply: Reply) -> StepOutcome:
        self._parameters.to_device()
        return StepOutcome(reply.iteration, reply.stop, max(reply.staleness), reply.admitted)

    def _finish_backward(self) -> None:
        """After every backward pass that synchronizes: average among workers if the script is to see the mean."""
        if self._combines:
            self._culprit = self._find_nonfinite()
            for flat in self._buckets.flats:
                if self._weight != 1.0:
                    flat.mul_(self._weight)
                self._collective.all_reduce(flat, op="mean").wait()
            self._is_combined = True
        self._versions_seen = self._versions()
        if self._is_undecided:
            self._sums_seen = self._sums()

    def _versions(self) -> list[int]:
        """In-place changes of any gradient so far, which views count on the tensor they are a view of."""
        return [flat._version for flat in self._buckets.flats]

    def _sums(self) -> list[int]:
        """The sum of each buffer's bytes, since torch does not count a scaler's unscaling as an in-place change."""
        return [int(flat.view(torch.uint8).sum()) for flat in self._buckets.flats]

    def _decide(self) -> None:
        """Keep combining if the script changed the gradients of its first step on any worker, or is about to."""
        is_scaled = getattr(self._replica.optimizer, "grad_scale", None) is not None
        changed = self._versions_seen is not None and (
            is_scaled or self._versions_seen != self._versions() or self._sums_seen != self._sums()
        )
        self._is_undecided = False
        if not self._strategy.backup_workers:
            self._combines = any(self._collective.all_gather_object(changed))
        elif changed:  # alone, since workers need not be at the same step
            raise UsageError(
                "the script changes gradients between backward() and step(), and under ps-bsp with backup_workers "
                "there is no mean gradient to change; use --option combine=never to change each worker's own"
            )

    def _require_gradients(self) -> None:
        for index, spec in enumerate(self._replica.specs):
            if not self._buckets.adopt(index):
                raise UsageError(
                    f"step {self._steps}: parameter {spec.name!r} has no gradient on rank {self._rank}, and servers "
                    "update every parameter at every step; freeze it with requires_grad_(False) or use all-reduce"
                )
        changed_late = self._versions_seen is not None and self._versions_seen != self._versions()
        is_blind = not self._combines and not self._is_undecided and self._strategy.combine == "auto"
        if changed_late and is_blind and self._strategy.consistency == "bsp" and self._collective.size > 1:
            raise UsageError(
                f"step {self._steps}: the script changed gradients between backward() and step(), which it did not do "
                "in its first step; use --option combine=always so that it sees the mean of all workers' gradients"
            )

    def _is_void(self) -> bool:
        """Whether this step has no gradient to give: it is not finite, or a scaler found that it is not.

        Raises:
            NonFiniteGradient: it is not finite and the option says so.
        """
        optimizer = self._replica.optimizer
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler around step() of fused optimizers
        if scale is not None:
            for flat in self._buckets.flats:
                flat.div_(scale)
        if is_skipped_by_scaler(optimizer):
            return True
        if self._strategy.nonfinite == "allow":
            return False
        own, self._culprit = self._culprit, None
        culprit = own or self._find_nonfinite()
        if culprit is not None and self._strategy.nonfinite == "raise":
            # What was finite here before the average became so by another rank's gradient.
            raise non_finite(rank=self._rank, step=self._steps, parameter=own if self._is_combined else culprit)
        return culprit is not None

    def _find_nonfinite(self) -> str | None:
        found = (self._buckets.find_nonfinite(bucket) for bucket in range(len(self._buckets.flats)))
        return next((name for name in found if name is not None), None)

    def _count_changes(self) -> int:
        """In-place changes of this worker's parameters by anyone but the servers, so far."""
        return sum(parameter._version for parameter in self._replica.parameters)

    def _require_unchanged(self) -> None:
        """
        Raises:
            UsageError: the script changed parameters itself, which servers would not know of, or moved them.
        """
        for parameter, place, spec in zip(self._replica.parameters, self._places, self._replica.specs, strict=True):
            if parameter.data_ptr() != place:
                raise UsageError(
                    f"step {self._steps}: parameter {spec.name!r} was moved or replaced after prepare; servers write "
                    "to its old place: bring the model to its device and dtype before prepare"
                )
        if self._count_changes() != self._num_changes:
            raise UsageError(
                f"step {self._steps}: the script changed parameters in place on rank {self._rank}, but the servers own "
                "them and would undo it; do so before prepare, or use all-reduce"
            )


@final
class _Mirror:
    """One flat buffer on the model's device and its twin in memory that the servers reach; the same on a CPU."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = host
        self.local = host if host.device == device else torch.zeros_like(host, device=device)

    def to_host(self) -> None:
        if self.local is not self.host:
            self.host.copy_(self.local)

    def to_device(self) -> None:
        if self.local is not self.host:
            self.local.copy_(self.host)
