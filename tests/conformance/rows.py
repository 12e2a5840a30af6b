"""The table of strategies that every conformance check runs over: a new strategy is one new row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.records import StepRecord
from paceline.running.result import Result
from paceline.strategies import build
from paceline.training.session import Session
from paceline.training.sharding import ShardedLoader
from paceline.training.worker import Worker
from tests.conformance import local_engine

When = Literal["quick", "slow", "never"]

SELDOM = 1_000_000
"""Iterations between checkpoints, in runs whose slow worker waits for the others: in a pause they would wait for it."""


@dataclass(frozen=True)
class Row:
    """One strategy as it is checked, and what is promised of it."""

    name: str
    strategy: str
    workers: int
    options: Mapping[str, Any] = field(default_factory=dict)
    is_deterministic: bool = True
    """The same run twice gives the same bits, so a resumed run equals an uninterrupted one."""
    updates_are_joint: bool = True
    """One update is made of all workers' gradients; else every gradient is an update."""
    drops_gradients: bool = False
    rounds_vary: bool = False
    """How many workers' changes make a round is not always the same."""
    workers_differ: bool = False
    """Each worker has a model, a step and a gradient of its own; the global model is the mean."""
    is_slow: bool = False
    """Left to `make test-slow` on the virtual engine."""
    in_processes: When = "slow"
    """When the same checks run in forked processes, where only the way of the bytes is another."""
    steps_an_iteration: int = 1
    """Local steps of a round, where an iteration is one."""
    is_exact: bool = True
    """Small whole numbers arrive as they are."""
    moves_every_step: bool = True
    """Each worker sends something in each of its steps, or rounds."""
    is_plain: bool = True
    """An iteration takes what workers found as it is, and leaves all of them with it."""
    has_debts: bool = False
    """Parameters move by what a worker could not send before, though it does not change them any more."""
    keeps_sizes: bool = True
    """A worker's smaller gradient makes a smaller update."""
    turns: int = 1
    """Passes over the loader, each a client's turn, in which every sample comes once."""
    options_to_change_gradients: Mapping[str, Any] = field(default_factory=dict)
    """What a script that clips gradients has to ask for."""

    @property
    def kind(self) -> tuple[bool | int, ...]:
        """Rows of one kind are promised the same, and checks ask them the same."""
        kept = (self.is_deterministic, self.updates_are_joint, self.drops_gradients, self.rounds_vary)
        asked = (self.is_exact, self.is_plain, self.has_debts, self.keeps_sizes)
        return (self.workers == 1, *kept, *asked, self.workers_differ, self.is_local, self.num_servers > 0, self.turns)

    @property
    def way(self) -> tuple[int, bool]:
        """How bytes go in processes: over one server, which lends its shards to the workers, or over several, from one
        worker to another at any time, or among all of them."""
        return min(self.num_servers, 2), self.nobody_counts

    @property
    def is_another_codec(self) -> bool:
        """It differs from another row in its codec alone."""
        return "codec" in self.options and self.is_slow and self.in_processes == "never"

    @property
    def is_local(self) -> bool:
        """Workers take steps alone."""
        return self.steps_an_iteration > 1

    @property
    def nobody_counts(self) -> bool:
        """While workers train, each knows of what the others have told it alone."""
        return self.workers_differ and not self.updates_are_joint

    @property
    def is_judged_beside(self) -> bool:
        """Evaluations have nobody meet: rank 0 keeps its model after the first of its steps that one is due at."""
        return bool(self.num_servers) and not self.updates_are_joint

    @property
    def num_servers(self) -> int:
        return build(self.strategy, self.options).traits.num_servers

    @property
    def trains_apart(self) -> bool:
        return build(self.strategy, self.options).traits.trains_apart

    def run(
        self, script: Callable[..., Any], out: Path, /, *, changes_gradients: bool = False, **settings: Any
    ) -> Result:
        """Run `script(worker, out)`."""
        more = self.options_to_change_gradients if changes_gradients else {}
        options = {**self.options, **more, **settings.pop("options", {})}
        return local_engine.run(
            partial(launched, script, out, turns=self.turns),
            strategy=self.strategy,
            workers=self.workers,
            options=options,
            out=out,
            **settings,
        )


GOSSIP = {"own_scores": False}  # the checks count how often the script's evaluation is called
CODECS = (
    "fp16",
    "bf16",
    "int8",
    "int8:scales=rows",
    "fp8",
    "qsgd:bits=8",
    "terngrad",
    "one-bit",
    "top-k:ratio=0.2",
    "random-k:ratio=0.5",
    "dct:edge=8",
)
"""What every strategy takes."""
JOINT_CODECS = ("sign", "powersgd:start=3:least=1")
"""What only workers among themselves take."""
JOINTLY_SERVED = ("fp16", "int8", "fp8", "terngrad", "one-bit", "random-k:ratio=0.5")
"""Servers take and give codes in one way, whether all gradients make an update or each does: the checks run over each
codec under one of the two, and under all-reduce."""


def coded(strategy: str, codec: str, **fields: Any) -> Row:
    """A row for a strategy with a codec, left to `make test-slow` unless it says otherwise. Of those that differ in
    nothing but their codec one is checked in processes."""
    name = f"{strategy}-{codec.partition(':')[0]}{'-rows' if 'rows' in codec else ''}"
    options = {"codec": codec, "codec_scope": "all", **fields.pop("options", {})}
    is_exact = codec.partition(":")[0] in ("fp16", "bf16")
    return Row(name, strategy, 2, options, **{"is_slow": True, "is_exact": is_exact, "in_processes": "never", **fields})


# In processes one row of those whose bytes take the same way is enough. So these are left out: single, which sends
# nothing, sgp and relay beside gossip, rounds of all beside those of a quorum, and powersgd's beside its steps.
# One server lends its shards to the workers, and three do not, so that both are there.
ROWS = (
    Row("single", "single", 1, in_processes="never"),
    Row("all-reduce", "all-reduce", 2, in_processes="quick"),
    Row("ring", "ring", 2, is_slow=True),
    Row("ps-bsp", "ps-bsp", 2),
    Row("ps-bsp-3-servers", "ps-bsp", 2, {"servers": 3}, in_processes="quick"),
    Row(
        "ps-bsp-backup",
        "ps-bsp",
        3,
        {"backup_workers": 1, "servers": 2},
        is_deterministic=False,
        drops_gradients=True,
        options_to_change_gradients={"combine": "never"},
    ),
    Row("ps-ssp", "ps-ssp", 2, {"staleness": 2, "servers": 2}, is_deterministic=False, updates_are_joint=False),
    Row("ps-asp", "ps-asp", 2, is_deterministic=False, updates_are_joint=False, in_processes="quick"),
    Row("gossip", "gossip", 2, GOSSIP, workers_differ=True),
    Row("gossip-awc", "gossip", 3, {**GOSSIP, "topology": "one-peer", "order": "awc"}, workers_differ=True),
    Row("sgp", "sgp", 3, GOSSIP, workers_differ=True, in_processes="never"),
    Row("relay", "relay", 2, GOSSIP, workers_differ=True, in_processes="never"),
    Row("noloco", "noloco", 2, {**GOSSIP, "every": 2}, workers_differ=True, moves_every_step=False, is_plain=False),
    Row(
        "ad-psgd",
        "ad-psgd",
        2,
        GOSSIP,
        is_deterministic=False,
        updates_are_joint=False,
        workers_differ=True,
        is_exact=False,
        moves_every_step=False,
        in_processes="quick",
    ),
    coded("gossip", "int8", options=GOSSIP, workers_differ=True, is_slow=False, in_processes="slow"),
    coded("gossip", "top-k:ratio=0.2", options={**GOSSIP, "order": "awc"}, workers_differ=True),
    *(
        coded(
            "all-reduce",
            codec,
            is_slow=not codec.startswith("powersgd"),
            in_processes="slow" if codec.startswith(("powersgd", "top-k")) else "never",
        )
        for codec in (*CODECS, *JOINT_CODECS)
    ),
    *(
        coded(
            "ps-bsp",
            codec,
            is_slow=codec != "int8",
            options_to_change_gradients={"combine": "always"},
            in_processes="slow" if codec == "int8" else "never",
        )
        for codec in JOINTLY_SERVED
    ),
    coded("ps-bsp", "sign", keeps_sizes=False, options_to_change_gradients={"combine": "never"}, in_processes="slow"),
    *(
        coded(
            "ps-asp",
            codec,
            is_deterministic=False,
            updates_are_joint=False,
            in_processes="slow" if codec.startswith("top-k") else "never",
        )
        for codec in CODECS
        if codec not in JOINTLY_SERVED
    ),
    Row("local-sgd", "local-sgd", 2, {"every": 3}, steps_an_iteration=3),
    Row(
        "diloco-fragments",
        "diloco",
        2,
        {"every": 4, "fragments": 2, "delay": 1, "alpha": 0.5},
        steps_an_iteration=4,
        is_plain=False,
    ),
    coded("local-sgd", "top-k:ratio=0.2", options={"every": 3}, steps_an_iteration=3, has_debts=True),
    coded(
        "local-sgd",
        "powersgd:start=3:least=1",
        options={"every": 3},
        steps_an_iteration=3,
        has_debts=True,
    ),
    coded(
        "diloco",
        "int8",
        options={"every": 4, "fragments": 2, "alpha": 0.5},
        steps_an_iteration=4,
        is_plain=False,
        is_slow=False,
        in_processes="slow",
    ),
    Row(
        "async-diloco",
        "async-diloco",
        2,
        {"every": 3, "quorum": 2, "outer": "average", "servers": 2},
        steps_an_iteration=3,
        is_slow=True,
        in_processes="never",
    ),
    Row(
        "async-diloco-quorum",
        "async-diloco",
        3,
        {"every": 3, "quorum": 2, "grace_s": 0.001, "servers": 2},
        is_deterministic=False,
        rounds_vary=True,
        steps_an_iteration=3,
        is_plain=False,
    ),
    coded(
        "async-diloco",
        "top-k:ratio=0.2",
        options={"every": 3, "quorum": 2, "outer": "average", "servers": 2},
        steps_an_iteration=3,
        has_debts=True,
    ),
    Row(
        "fed-avg",
        "fed-avg",
        2,
        {"clients": 12, "fraction": 1 / 6, "sampler": "cyclic"},
        steps_an_iteration=2,
        turns=6,
        in_processes="quick",
    ),
)

# See conftest.py.
every_row = pytest.mark.every_row
every_row_but_codecs = pytest.mark.every_row(of_codecs=False)
"""For checks of when a run begins and ends, of which codecs know nothing."""
every_deterministic_row = pytest.mark.every_row(is_deterministic=True)


def launched(script: Callable[..., Any], out: Path, *, turns: int = 1) -> None:
    worker = paceline.init()
    script(worker if turns == 1 and worker.device.type == "cpu" else Guided(worker, turns), out)


@final
class Guided:
    """A worker whose script sees so many passes over a loader as one, as the checks count on, with batches on a GPU."""

    def __init__(self, worker: Worker, turns: int) -> None:
        self._worker, self._turns = worker, turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def prepare(self, *given: Any, **named: Any) -> tuple[Any, ...]:
        prepared = self._worker.prepare(*given, **named)
        session = self._worker._session
        return tuple(
            _Chained(each, self._turns, session, self._worker.device) if isinstance(each, ShardedLoader) else each
            for each in prepared
        )


@final
class _Chained:
    def __init__(self, loader: ShardedLoader, turns: int, session: Session, device: torch.device) -> None:
        self._loader, self._turns, self._session, self._device = loader, turns, session, device

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._turns):
            has_ended = self._session.run.has_ended
            for batch in self._loader:
                yield [tensor.to(self._device) for tensor in batch]
            if has_ended:
                return

    def __len__(self) -> int:
        return self._turns * len(self._loader)


# --- what the checks' scripts share ---------------------------------------------------------------------------

NUM_SAMPLES, BATCH_SIZE = 96, 4


def problem(count: int = NUM_SAMPLES) -> TensorDataset:
    """Vectors of 10 numbers, a class that depends on them, and each sample's index."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 10, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), torch.arange(count))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))


def loader_of(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)


def loader_to_leave() -> DataLoader[Any]:
    """Of a script whose workers make their data themselves."""
    data = problem()
    data.differs_by_rank = True  # type: ignore[attr-defined]
    return loader_of(data)


def prepared(worker: Worker, *, lr: float = 0.1) -> tuple[nn.Sequential, Optimizer, DataLoader[Any]]:
    model = network()
    return worker.prepare(model, SGD(model.parameters(), lr=lr, momentum=0.5), loader_of(problem()))


def step(worker: Worker, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    worker.log(loss=loss)


def short_s() -> float:
    """Some of a run's steps take so long."""
    return local_engine.SHORT_S


def wait_until(is_so: Callable[[], bool]) -> None:
    """A script waits for what other workers do."""
    local_engine.wait_until(is_so)


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector, detached, in the host's memory."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


def checksum(state: Mapping[str, Tensor]) -> float:
    return sum(float(tensor.double().sum()) for tensor in state.values())


def keep(out: Path, name: str, value: Any) -> None:
    """Let the test see a value of the script."""
    torch.save(value, out / f"{name}.kept")


def kept(out: Path, name: str) -> Any:
    return torch.load(out / f"{name}.kept", weights_only=True, map_location="cpu")


def train(worker: Worker, out: Path, *, num_epochs: int = 4) -> None:
    """The plain script."""
    model, optimizer, loader = prepared(worker)
    for _ in range(num_epochs):
        for x, y, _ in loader:
            step(worker, model, optimizer, x, y)


def steps_of(result: Result, worker: int) -> list[StepRecord]:
    return [record for record in result.steps if record.worker == worker]


def require_through(row: Row, num_steps: list[int], steps_a_worker: int) -> None:
    """Every worker is through its data; where late gradients are dropped, the first to be so ends it for all."""
    if row.drops_gradients:
        assert max(num_steps) == steps_a_worker
    else:
        assert num_steps == [steps_a_worker] * row.workers
