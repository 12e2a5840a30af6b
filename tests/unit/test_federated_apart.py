"""Where clients and server of a federated run are apart: what each of them believes of the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from paceline.comm.alone import AloneCollective
from paceline.layout import TensorSpec
from paceline.membership import Membership
from paceline.roster import Roster
from paceline.strategies import build
from paceline.strategies.base import Context, Strategy, Synchronizer
from paceline.strategies.elsewhere import ClientsElsewhere, ClientUpdate, ServerElsewhere
from paceline.strategies.replica import describe

EVERYBODY = {"clients": "3", "fraction": "1"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))


class Sending:
    """Clients who send one number each, and say what it is worth."""

    coding_seed, outweigh = 0, 10.0

    def __init__(self, *sent: tuple[float, float]) -> None:
        self._sent, self.refused = sent, [""] * len(sent)
        self.said: list[str] = []

    def describe(
        self, state: Sequence[TensorSpec], update: Sequence[TensorSpec], *, current: Callable[[], Sequence[Tensor]]
    ) -> None:
        self.names = [spec.name for spec in update]

    def collect(self, number: int, take: Callable[[ClientUpdate], None]) -> bool:
        for client, (change, scale) in enumerate(self._sent):
            try:
                take(ClientUpdate(client, [torch.tensor([change])], 1.0, scale))
            except ValueError as error:
                self.refused[client] = str(error)
        return False

    def tell(self, text: str) -> None:
        self.said.append(text)


class Afar:
    """A server who always has a turn, and counts the updates of some rounds."""

    client, coding_seed = 0, 0

    def __init__(self, *, counts: set[int]) -> None:
        self._counts = counts
        self.round, self.counted, self.num_sent = -1, -1, 0

    def attach(self, state: Sequence[TensorSpec], update: Sequence[TensorSpec], *, samples: int) -> None:
        pass

    def next_turn(self, state: Sequence[Tensor]) -> bool:
        for tensor in state:
            tensor.zero_()
        if self.round in self._counts:
            self.counted = self.round
        self.round += 1
        return False

    def send(self, update: Sequence[Tensor], *, scale: float) -> None:
        self.num_sent += 1

    def pulse(self) -> None:
        pass

    def leave(self) -> None:
        pass


def near_one(model: nn.Module) -> dict[str, float]:
    """What samples of the server's own say, whose best number is 1."""
    return {"loss": abs(float(next(model.parameters()).detach()) - 1)}


def bound(
    strategy: Strategy, *, clients: ClientsElsewhere | None = None, server: ServerElsewhere | None = None
) -> tuple[Synchronizer, Model, SGD]:
    participation = strategy.participation()
    assert participation is not None
    here = participation.at_client() if server is not None else participation.at_server()
    sizes = [4] * here.num_clients
    roster = Roster(here, sizes=sizes, num_batches=sizes, rank=0, ranks=[0], seed=0)
    model = Model()
    optimizer = SGD(model.parameters(), lr=0.1)
    context = Context(
        0,
        Membership.first(1),
        0,
        1,
        torch.device("cpu"),
        AloneCollective(),
        roster=roster,
        clients=clients,
        server=server,
        evaluate=near_one,
    )
    return strategy.bind(context, describe(model, optimizer)), model, optimizer


def stepped(strategy: Strategy, clients: Sending) -> float:
    """The server's number after a round."""
    synchronizer, _, _ = bound(strategy, clients=clients)
    synchronizer.wait_for_admission(pause_at=0)
    with synchronizer.global_model() as model:
        return float(next(model.parameters()).detach())


@pytest.mark.parametrize("options", [{}, {"privacy": "central", "weights": "equal"}, {"aggregate": "median"}])
def test_where_steps_do_not_count_nobody_says_what_they_are_worth(options: dict[str, str]) -> None:
    clients = Sending((1.0, 1.0), (2.0, 1e8), (1.0, 1.0))
    options = {**EVERYBODY, **options}
    if "privacy" in options:
        options |= {"privacy.noise": "1e-6", "privacy.clip": "1"}
    found = stepped(build("fed-avg", options), clients)
    assert abs(found) == pytest.approx(2 / 3 if "privacy" in options else 1.0, abs=1e-4)
    assert [bool(each) for each in clients.refused] == [False, True, False]
    assert "worth 1e+08 steps, and steps do not count" in clients.refused[1]


def test_a_server_judges_what_clients_elsewhere_send_and_says_whom_it_left_out() -> None:
    """With a tenth of its change alone the second one's model is 50 from the best number."""
    clients = Sending((-1.0, 1.0), (500.0, 1.0), (-2.0, 1.0))
    assert stepped(build("fed-avg", {**EVERYBODY, "reject": "validation"}), clients) == pytest.approx(1.5)
    assert clients.refused == ["", "", ""], "each was in the right form"
    assert clients.said == ["round 1: loss was 1; left out, as it would be worse: client 1 (51)"]


def test_of_nobody_so_many_steps_count_that_they_outweigh_the_median() -> None:
    clients = Sending((-2.0, 2.0), (-4.0, 4.0), (-1e8, 1e8))
    found = stepped(build("fed-nova", EVERYBODY), clients)
    assert found == pytest.approx((2 + 4 + 40) / 3)
    assert clients.refused == ["", "", ""]


def test_steps_that_are_less_than_one_are_refused() -> None:
    clients = Sending((-2.0, 2.0), (-1e30, 1e-30))
    assert stepped(build("fed-nova", EVERYBODY), clients) == 2.0
    assert "less than one" in clients.refused[1]


def test_a_round_whose_sum_is_infinite_changes_nothing() -> None:
    clients = Sending((3e38, 1.0), (3e38, 1.0))
    assert stepped(build("fed-avg", EVERYBODY), clients) == 0.0
    assert ["too large" in text for text in clients.said] == [True]


def test_what_a_client_keeps_goes_with_the_updates_that_counted() -> None:
    """Those of rounds 1 and 3 came too late, or were refused."""
    synchronizer, model, optimizer = bound(build("scaffold", EVERYBODY), server=Afar(counts={0, 2}))
    synchronizer.start()
    found = [played(synchronizer, model, optimizer, slope) for slope in (1.0, 2.0, 3.0, 4.0)]
    assert found == pytest.approx([1.0, 1.0, 3.0, 3.0])


@pytest.mark.parametrize(("counts", "kept"), [({0, 1}, 2.0), ({0}, 1.0)], ids=["counted", "late"])
def test_a_client_that_ends_while_it_waits_goes_on_with_what_it_kept(counts: set[int], kept: float) -> None:
    """Its checkpoint is of before the update left, and whether that counted the server says afterwards."""
    strategy, server = build("scaffold", EVERYBODY), Afar(counts=counts)
    synchronizer, model, optimizer = bound(strategy, server=server)
    synchronizer.start()
    played(synchronizer, model, optimizer, 1.0)
    trained(synchronizer, model, optimizer, 2.0)
    outcome = synchronizer.end_turn()
    assert (outcome.iteration, server.num_sent) == (2, 1)
    saved = {name: each.tensor for name, each in synchronizer.own_state().items()}

    synchronizer, model, optimizer = bound(strategy, server=server)
    synchronizer.restore({}, saved, iteration=outcome.iteration)
    synchronizer.start()
    assert own_control(synchronizer) == pytest.approx(kept)
    assert played(synchronizer, model, optimizer, 5.0) == pytest.approx(kept)
    assert server.num_sent == 2


def played(synchronizer: Synchronizer, model: Model, optimizer: SGD, slope: float) -> float:
    """The client's own control after a turn, which is the mean gradient where it is kept (Karimireddy et al., ICML
    2020, option II)."""
    trained(synchronizer, model, optimizer, slope)
    assert not synchronizer.end_turn().admitted
    assert synchronizer.wait_for_admission(pause_at=0).admitted
    return own_control(synchronizer)


def trained(synchronizer: Synchronizer, model: Model, optimizer: SGD, slope: float) -> None:
    synchronizer.begin_turn()
    for _ in range(4):
        optimizer.zero_grad()
        (slope * model.x).sum().backward()
        synchronizer.step(optimizer.step, pause_at=0)


def own_control(synchronizer: Synchronizer) -> float:
    own = [each.tensor for name, each in synchronizer.own_state().items() if name == "client.0.control.0"]
    return float(own[0])
