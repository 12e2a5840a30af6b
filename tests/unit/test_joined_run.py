"""A client's own run, without its server: what is on its disk when its update leaves, and what it does with that."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.config import RunConfig
from paceline.engines.directory_reporter import DirectoryReporter
from paceline.engines.scripting import read_script
from paceline.engines.served import running
from paceline.layout import TensorSpec
from paceline.running.result import Result
from paceline.strategies import build

SCRIPT = Path(__file__).parents[1] / "distributed" / "scripts" / "own_data.py"


@pytest.fixture(autouse=True)
def own_main(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts run in this process, as its `__main__`, which a client's process does not have back."""
    with monkeypatch.context() as meanwhile:
        meanwhile.setitem(sys.modules, "__main__", sys.modules["__main__"])
        meanwhile.setattr(sys, "argv", sys.argv)
        meanwhile.setattr(sys, "path", [*sys.path])
        yield


class Gone(Exception):
    """The client's process ends here."""


class Afar:
    """A server whose model is zeros, that has so many turns for the client, which ends while it waits for the next. It
    knows of no updates but those that were sent to it."""

    client, coding_seed = 0, 0

    def __init__(self, directory: Path, *, turns: int, then_ends: bool) -> None:
        self._directory, self._turns, self._then_ends = directory, turns, then_ends
        self.round, self.counted = -1, -1
        self.sent: list[list[Tensor]] = []
        self.num_waits, self.is_left = 0, False
        self.on_disk: list[int] = []
        """Of each update, the iteration of the checkpoint that was there as it left."""

    def attach(self, state: Sequence[TensorSpec], update: Sequence[TensorSpec], *, samples: int) -> None:
        pass

    def next_turn(self, state: Sequence[Tensor]) -> bool:
        self.num_waits += 1
        if self.round + 1 == self._turns and not self._then_ends:
            raise Gone
        for tensor in state:
            tensor.zero_()
        self.counted = self.round if self.sent else -1
        self.round += 1
        return self.round == self._turns

    def send(self, update: Sequence[Tensor], *, scale: float) -> None:
        self.sent.append([tensor.clone() for tensor in update])
        self.on_disk.append(checkpoint_in(self._directory).iteration)

    def pulse(self) -> None:
        pass

    def leave(self) -> None:
        self.is_left = True


def checkpoint_in(directory: Path) -> Checkpoint:
    return Checkpoint.decode((directory / FILE_NAME).read_bytes(), where="")


def join(directory: Path, server: Afar, *, options: dict[str, str], checkpoint: Checkpoint | None = None) -> None:
    config = RunConfig(checkpoint_every=1, device="cpu", seed=7)
    strategy = build("fed-avg", {"clients": "2", "fraction": "1", **options})
    with closing(DirectoryReporter(directory, config, lambda records, progress: None)) as reporter:
        world = running._world(strategy, config, reporter, checkpoint, server=server)
        with running._entered(world):
            running._run(read_script(SCRIPT, []), world)


def ends_while_it_waits(directory: Path, *, options: dict[str, str]) -> Afar:
    server = Afar(directory, turns=2, then_ends=False)
    with pytest.raises(Exception, match="Gone"):
        join(directory, server, options=options)
    return server


def test_what_a_client_keeps_is_on_its_disk_before_its_update_leaves(tmp_path: Path) -> None:
    assert ends_while_it_waits(tmp_path, options={}).on_disk == [1, 2]


def test_a_client_that_ended_while_it_waited_draws_no_noise_twice_and_counts_what_it_spent(tmp_path: Path) -> None:
    """From the difference of two changes under the same noise the server could read both."""
    options = {"privacy": "local", "privacy.noise": "100", "privacy.clip": "1"}
    first = ends_while_it_waits(tmp_path, options=options)
    second = Afar(tmp_path, turns=1, then_ends=True)
    join(tmp_path, second, options=options, checkpoint=checkpoint_in(tmp_path))
    assert second.on_disk == [3]
    *before, after = (torch.cat([tensor.flatten() for tensor in update]) for update in (*first.sent, *second.sent))
    assert all(float((after - each).norm()) > 100 for each in before)
    assert Result(tmp_path).iteration == 3


def test_a_client_that_comes_back_for_the_end_evaluates_the_servers_last_model(tmp_path: Path) -> None:
    ends_while_it_waits(tmp_path, options={})
    join(tmp_path, Afar(tmp_path, turns=0, then_ends=True), options={}, checkpoint=checkpoint_in(tmp_path))
    result = Result(tmp_path)
    assert [each.iteration for each in result.evaluations] == [2]
    assert all(not tensor.any() for tensor in result.model_state().values())


def controls_in(directory: Path) -> Tensor:
    """The client's own control variates, as its checkpoint has them."""
    (worker,) = checkpoint_in(directory).workers
    return torch.cat([each.flatten() for name, each in worker.own.items() if name.startswith("client.0.control.")])


def test_a_client_has_its_last_turn_when_a_server_is_started_again_for_further_rounds(tmp_path: Path) -> None:
    """That server says that no update has counted."""
    options = {"correction": "control-variates"}
    join(tmp_path, Afar(tmp_path, turns=1, then_ends=True), options=options)
    controls = controls_in(tmp_path)
    assert controls.any()
    join(tmp_path, Afar(tmp_path, turns=0, then_ends=True), options=options, checkpoint=checkpoint_in(tmp_path))
    assert torch.equal(controls_in(tmp_path), controls)


def test_a_client_whose_budget_is_spent_leaves_and_waits_for_no_turn(tmp_path: Path) -> None:
    """Its last update has left. One that comes back with no more to spend leaves at once."""
    one_turn = {"privacy": "local", "privacy.noise": "100", "privacy.epsilon": "0.1"}
    server = Afar(tmp_path, turns=9, then_ends=True)
    join(tmp_path, server, options=one_turn)
    assert len(server.sent) == server.num_waits > 0
    assert server.is_left
    again = Afar(tmp_path, turns=9, then_ends=True)
    join(tmp_path, again, options=one_turn, checkpoint=checkpoint_in(tmp_path))
    assert (again.num_waits, again.is_left) == (0, True)
