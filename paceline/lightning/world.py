"""A run's workers as Lightning's strategies see them, and what they do together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.comm.base import ReduceOp
from paceline.errors import UsageError
from paceline.training.sharding import RoundBatches
from paceline.training.worker import Worker

_OPS: dict[str, ReduceOp] = {"avg": "mean", "mean": "mean", "sum": "sum", "min": "min", "max": "max"}
_Base: Any = object


class WorldBody(_Base):  # type: ignore[misc]
    """
    Raises:
        UsageError: the Trainer asks for other workers than the run has, or for what they cannot do together.
    """

    lightning_module: Any
    _worker: Worker
    _is_prepared = False
    _is_in_step = False
    _rounds: RoundBatches | None = None  # where there are clients

    @property
    def root_device(self) -> torch.device:
        return self._worker.device

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        here = self._worker.device
        if devices and (devices[0].type != here.type or len(devices) not in (1, self._worker.size)):
            raise UsageError(
                f"Trainer(devices=...) asks for {len(devices)} {devices[0].type} devices, and the run has "
                f"{self._worker.size} workers, each on {here.type}: leave accelerator and devices out, and give "
                "`paceline run` --workers and --device"
            )
        self._devices = [here] if devices else None

    @property
    def num_nodes(self) -> int:
        return int(self.cluster_environment.num_nodes)

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number not in (1, self.num_nodes):
            raise UsageError(
                f"Trainer(num_nodes={number}): the run's workers are on {self.num_nodes} hosts; leave it out"
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._worker.size, "rank": self._worker.rank}

    @property
    def is_distributed(self) -> bool:
        """Lightning asks before it reduces metrics, and before it divides a loader; it leaves training data to
        `worker.prepare`."""
        module = self.lightning_module
        return self._is_prepared or module is None or not module.trainer.training

    # --- what all workers do together ---------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in _OPS:
            raise UsageError(f"workers reduce by {', '.join(_OPS)}, not by {reduce_op!r}")
        own = tensor.detach().clone()
        if _OPS[name] == "mean" and not (own.is_floating_point() or own.is_complex()):
            own = own.float()  # such as a number of samples, by which Lightning divides
        with self._all("a reduction"):
            return self._worker.all_reduce(own, op=_OPS[name])

    def barrier(self, name: str | None = None) -> None:
        with self._all(f"Lightning's barrier {name or ''}".strip()):
            self._worker.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self._all("a broadcast"):
            return self._worker.broadcast_object(obj, root=src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            raise UsageError("all_gather(sync_grads=True) is not there: gather detached tensors (sync_grads=False)")
        return torch.stack(self._gathered(tensor))

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        with self._all("a gathering"):
            return self._worker.all_gather(tensor.detach())

    @contextmanager
    def _all(self, place: str) -> Iterator[None]:
        """Workers in lock step are at the same place anyway."""
        if self._worker.strategy.traits.lock_step:
            yield
            return
        if self._is_in_step:
            raise UsageError(
                f"{place} in training_step needs all workers at every step, which this strategy does not keep: log "
                "with on_step=False, on_epoch=True, or with sync_dist=False"
            )
        self._require_between_rounds(place)
        with self._worker.meeting(place):
            yield
        self._stop_if_over()

    def _require_between_rounds(self, place: str) -> None:
        if self._rounds is not None:
            self._rounds.require_between(place)

    def _stop_if_over(self) -> None:
        if self._worker.is_over and self.lightning_module is not None:
            self.lightning_module.trainer.should_stop = True
