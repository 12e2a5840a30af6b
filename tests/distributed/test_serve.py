"""Federated runs whose clients are processes of their own: the right model, whatever becomes of some of them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.namespaces import Host
from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.cli import tables
from paceline.comm.client_sockets import ServerSocket
from paceline.comm.tickets import Ticket, Tickets
from paceline.config import RunConfig, Target
from paceline.engines.served.server import ServerAfar
from paceline.errors import UsageError
from paceline.interval import Interval
from paceline.layout import TensorSpec
from paceline.messages import Kind, Message
from paceline.outer import Average, FedAdam
from paceline.privacy import Local
from paceline.records import EventRecord, UpdateRecord, read_records
from paceline.running import launch, serving
from paceline.running.result import Result
from paceline.served.form import EPOCH, VERSION
from tests.distributed.harness import SCRIPTS, wait_until
from tests.distributed.own_network import own_network
from tests.forks import FORKS
from tests.ports import free_port

SCRIPT = SCRIPTS / "own_data.py"
LR, BATCH = 0.05, 10


def data_of(part: int) -> tuple[Tensor, Tensor]:
    """As the script has them."""
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(20 + 10 * part, 5, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + part


def oracle(
    rounds: list[list[int]], *, outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], weighs: bool = True
) -> dict[str, Tensor]:
    """Rounds in one process, each of these clients, whose numbers are those of their data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    server = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    steps = outer(server)
    for clients in rounds:
        if not clients:
            continue
        total = sum(len(data_of(client)[0]) for client in clients)
        sums = [torch.zeros_like(parameter) for parameter in server]
        for client in clients:
            with torch.no_grad():
                for parameter, own in zip(model.parameters(), server, strict=True):
                    parameter.copy_(own)
            optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=LR), data_of(client)
            for inputs, wanted in zip(x.split(BATCH), y.split(BATCH), strict=True):
                optimizer.zero_grad()
                F.mse_loss(model(inputs), wanted).backward()
                optimizer.step()
            for sum_, own, parameter in zip(sums, server, model.parameters(), strict=True):
                sum_ += (len(x) / total if weighs else 1 / len(clients)) * (own.detach() - parameter.detach())
        for parameter, sum_ in zip(server, sums, strict=True):
            parameter.grad = sum_
        steps.step()
    return dict(zip(model.state_dict(), (parameter.detach() for parameter in server), strict=True))


def accepted(result: Result) -> list[list[int]]:
    """The clients that counted, round by round."""
    rounds: dict[int, list[int]] = {number: [] for number in range(result.iteration)}
    for record in read_records(result.directory, UpdateRecord):
        rounds[record.iteration - 1].append(record.worker)
    return [sorted(clients) for clients in rounds.values()]


def listening_ports() -> set[int]:
    return {each.laddr.port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def serves(directory: Path, port: int, strategy: str, options: dict[str, Any], max_steps: int) -> None:
    """The server's process."""
    serving.serve(
        SCRIPT,
        strategy=strategy,
        options=options,
        tickets=directory / "tickets",
        address=f"127.0.0.1:{port}",
        listen=f"127.0.0.1:{port}",
        rounds=serving.Rounds(min_clients=2),
        config=RunConfig(max_steps=max_steps, device="cpu"),
        seed=0,
        say=lambda line: None,
    )


def joins(directory: Path, client: int) -> None:
    """A client's process."""
    serving.join(
        SCRIPT,
        ticket=directory / "tickets" / f"client-{client}.ticket",
        arguments=["--parts", str(client)],
        out=directory / f"client-{client}",
        config=RunConfig(device="cpu"),
        say=lambda line: None,
    )


def test_two_clients_and_a_stranger(tmp_path: Path) -> None:
    """The server's model is that of the same rounds in one process, and clients go home with it."""
    port = free_port()
    Tickets.made(tmp_path / "tickets", num_clients=3, address=f"127.0.0.1:{port}")
    others = Tickets.made(tmp_path / "others", num_clients=1, address=f"127.0.0.1:{port}")
    Tickets(tmp_path / "tickets").revoke(2)
    options = {"clients": 3, "fraction": 1.0, "outer.lr": "0.5"}
    processes = [FORKS.Process(target=serves, args=(tmp_path, port, "fed-adam", options, 4))]
    processes += [FORKS.Process(target=joins, args=(tmp_path, client)) for client in (0, 1)]
    for process in processes:
        process.start()
    # Whoever finds nobody there tries again, which might be when all is over.
    assert wait_until(lambda: port in listening_ports())
    with closing(ServerSocket(Ticket.read(others.path_of(0)))) as stranger:
        stranger.send(Message(Kind.JOIN, EPOCH, body={"version": VERSION}))
        for process in processes:
            process.join(timeout=300)
        assert stranger.receive(0.0) is None
    assert [process.exitcode for process in processes] == [0, 0, 0]
    result = Result(tmp_path / "tickets" / "run")
    assert accepted(result) == [[0, 1]] * 4
    assert result.training_time_s == result.evaluations[-1].time_s > 0.0
    shown = dict(zip(*(column.cells for column in tables.summary(result).columns), strict=True))
    assert shown["strategy"] == "fed-adam, 8 updates of 2 client(s)"
    assert shown.keys().isdisjoint({"samples/s", "time spent"})
    wanted = oracle(accepted(result), outer=FedAdam(lr=0.5).optimizer)
    torch.testing.assert_close(result.model_state(), wanted, rtol=1e-9, atol=1e-9)
    for client in (0, 1):
        assert Result(tmp_path / f"client-{client}").model_state().keys() == wanted.keys()
        torch.testing.assert_close(Result(tmp_path / f"client-{client}").model_state(), result.model_state())
    said = [record.details["text"] for record in read_records(result.directory, EventRecord) if record.name == "said"]
    assert any("without a ticket" in text for text in said)


ALIKE: dict[str, dict[str, str]] = {
    "scaffold": {"epochs": "2"},
    "fed-nova": {},
    "fed-prox": {"correction.mu": "0.5", "weights": "equal"},
    "fed-avgm": {"codec": "top-k", "codec.ratio": "0.3", "optimizer": "kept"},
    "fed-avg": {"codec": "fp16", "codec.feedback": "false", "aggregate": "median"},
    "dp-fed-avg": {"privacy.clip": "0.3"},
}
"""What clients draw does not show; the server's noise is drawn from its seed."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ALIKE)
def test_clients_elsewhere_train_as_simulated_ones_do(strategy: str, tmp_path: Path) -> None:
    """The same data in one file, each sample's client named."""
    options = {"clients": "2", "fraction": "1", **ALIKE[strategy]}
    found = served(tmp_path, strategy, options)
    owners = tmp_path / "owners.txt"
    owners.write_text("".join(f"{client}\n" * len(data_of(client)[0]) for client in (0, 1)))
    simulated = launch.run(
        SCRIPT,
        strategy=strategy,
        options={**options, "partition": "file", "partition.path": str(owners)},
        arguments=["--parts", "0,1"],
        engine="virtual",
        cluster="lab-1gbe",
        max_steps=5,
        out=tmp_path / "simulated",
    )
    assert accepted(found) == [[0, 1]] * 5
    torch.testing.assert_close(found.model_state(), simulated.model_state(), rtol=1e-6, atol=1e-6)
    assert found.metrics.get("epsilon") == simulated.metrics.get("epsilon")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"weights": "equal", "secure.neighbours": "2"}], ids=str)
def test_clients_under_masks_train_to_the_same_model(options: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    masks = {"secure": "masks", "secure.clip": "4", **options}
    result = served(tmp_path, "fed-avg", {"clients": "3", "fraction": "1", **masks}, num_clients=3)
    assert accepted(result) == [[0, 1, 2]] * 5
    assert result.iteration == 5
    wanted = oracle(accepted(result), outer=Average().optimizer, weighs="weights" not in options)
    torch.testing.assert_close(result.model_state(), wanted, rtol=0.0, atol=1e-7)
    for client in range(3):
        torch.testing.assert_close(Result(tmp_path / f"client-{client}").model_state(), result.model_state())


@pytest.mark.slow
def test_noise_of_clients_is_their_own_and_they_know_what_they_have_spent(tmp_path: Path) -> None:
    local = {"privacy": "local", "privacy.clip": "1e-4", "privacy.noise": "2"}
    found = served(tmp_path, "fed-avg", {"clients": "2", "fraction": "1", **local})
    before = oracle([], outer=FedAdam().optimizer)
    moved = torch.cat([(found.model_state()[name] - before[name]).flatten() for name in before])
    assert 1e-5 < float(moved.abs().max()) < 1e-2  # clipped, and under noise
    assert "epsilon" not in found.metrics
    spent = [Result(tmp_path / f"client-{client}").metrics["epsilon"] for client in (0, 1)]
    assert spent[0] == spent[1] == pytest.approx(Local(noise=2.0).spent(rounds=5, most_turns=5, sample_rate=1.0))


def served(directory: Path, strategy: str, options: dict[str, str], *, num_clients: int = 2) -> Result:
    """Of five rounds."""
    port = free_port()
    Tickets.made(directory / "tickets", num_clients=num_clients, address=f"127.0.0.1:{port}")
    processes = [FORKS.Process(target=serves, args=(directory, port, strategy, options, 5))]
    processes += [FORKS.Process(target=joins, args=(directory, client)) for client in range(num_clients)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    return Result(directory / "tickets" / "run")


# --- in network namespaces -------------------------------------------------------------------------------------------

NUM_HOSTS, NUM_RUBBISH = 9, 1_000_000
KILLED, LATE, HOSTILE = 5, 6, 7
_CLONE_NEWNET = 0x40000000


def at(host: str, work: Callable[..., None], *arguments: Any) -> None:
    """What a process does that lives on that host."""
    with open(f"/run/netns/{host}") as namespace:
        assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) == 0
    work(*arguments)


def serves_until_enough(directory: Path, address: str) -> None:
    with (directory / "server.log").open("a") as log:
        serving.serve(
            SCRIPT,
            strategy="fed-adam",
            options={"clients": 8, "fraction": 1.0, "outer.lr": "0.5"},
            tickets=directory / "tickets",
            address=address,
            arguments=["--over-at", str(directory / "enough")],
            rounds=serving.Rounds(min_clients=4, deadline_s=6.0),
            config=RunConfig(target=Target.parse("over>=1"), eval_every=Interval.parse("1"), hold=1, device="cpu"),
            say=lambda line: print(line, file=log, flush=True),
        )


def joins_slowly(directory: Path, client: int, step_s: float) -> None:
    serving.join(
        SCRIPT,
        ticket=directory / "tickets" / f"client-{client}.ticket",
        arguments=["--parts", str(client), "--step-s", str(step_s)],
        out=directory / f"client-{client}",
        config=RunConfig(device="cpu"),
        say=lambda line: None,
    )


def sends_rubbish(directory: Path) -> None:
    """Who has a ticket: a model of another shape, an update that is not a number, one of 10 GB, and a million messages
    that are none."""
    ticket = Ticket.read(directory / "tickets" / f"client-{HOSTILE}.ticket")
    right = [TensorSpec(name, shape, torch.float64) for name, shape in SHAPES.items()]
    wrong = [TensorSpec(name, (*shape, 2), torch.float64) for name, shape in SHAPES.items()]

    def server() -> ServerAfar:
        return ServerAfar(ServerSocket(ticket), where=ticket.address, deadline_s=100.0, say=lambda line: None)

    state = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES.values()]
    first = server()
    first.join()
    first.attach(wrong, wrong, samples=10)
    with suppress(UsageError):
        first.next_turn(state)
    second = server()
    second.join()
    second.attach(right, right, samples=2**40)
    second.next_turn(state)
    second.send([torch.full_like(tensor, float("nan")) for tensor in state], scale=1.0)
    second.next_turn(state)
    socket = second._socket
    announced = Message(Kind.UPDATE, EPOCH, iteration=second.round, tensor_bytes=10 * 2**30, payload=[b"1" * 100])
    socket.send(announced)
    for _ in range(NUM_RUBBISH):
        socket._socket.send_multipart([b"P1 and rubbish", b"{"])
    (directory / "rubbish is sent").touch()
    time.sleep(1000)


SHAPES = {"0.weight": (4, 5), "0.bias": (4,), "2.weight": (1, 4), "2.bias": (1,)}


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_eight_clients_of_which_one_dies_one_is_late_and_one_sends_rubbish(tmp_path: Path) -> None:
    """Meanwhile the server is killed, too, and begins its round again."""
    run = tmp_path / "tickets" / "run"

    def rounds_done() -> int:
        path = run / FILE_NAME
        return Checkpoint.decode(path.read_bytes(), where="").iteration if path.exists() else 0

    with own_network(NUM_HOSTS) as hosts:
        first, *others = hosts.hosts
        address = f"{first.address}:9610"
        Tickets.made(tmp_path / "tickets", num_clients=8, address=address)

        def start(host: Host, work: Callable[..., None], *arguments: Any) -> Any:
            process = FORKS.Process(target=at, args=(host.name, work, *arguments), daemon=True)
            process.start()
            return process

        server = start(first, serves_until_enough, tmp_path, address)
        honest = {
            client: start(others[client], joins_slowly, tmp_path, client, 5.0 if client == KILLED else 0.05)
            for client in (0, 1, 2, 3, 4, KILLED)
        }
        try:
            assert wait_until(lambda: rounds_done() >= 2)
            honest[KILLED].kill()
            hostile = start(others[HOSTILE], sends_rubbish, tmp_path)
            assert wait_until(lambda: rounds_done() >= 4)
            server.kill()
            server.join()
            before = rounds_done()
            server = start(first, serves_until_enough, tmp_path, address)
            honest[LATE] = start(others[LATE], joins_slowly, tmp_path, LATE, 0.05)
            memory = psutil.Process(server.pid)
            sizes = []

            def has_seen_all() -> bool:
                with suppress(psutil.Error):
                    sizes.append(memory.memory_info().rss)
                return (tmp_path / "rubbish is sent").exists() and any(
                    record.worker == LATE for record in read_records(run, UpdateRecord)
                )

            assert wait_until(has_seen_all, within_s=400)
            (tmp_path / "enough").touch()
            server.join(timeout=300)
            assert server.exitcode == 0
            for client in (0, 1, 2, 3, 4, LATE):
                honest[client].join(timeout=300)
                assert honest[client].exitcode == 0
        finally:
            for process in (server, *honest.values(), hostile):
                process.kill()
                process.join()
    result = Result(run)
    counted = accepted(result)
    assert len(counted) > before >= 4
    assert all(HOSTILE not in clients for clients in counted)
    assert set(counted[-1]) <= {0, 1, 2, 3, 4, LATE}
    assert any(LATE in clients for clients in counted)
    wanted = oracle(counted, outer=FedAdam(lr=0.5).optimizer)
    torch.testing.assert_close(result.model_state(), wanted, rtol=1e-9, atol=1e-9)
    log = (tmp_path / "server.log").read_text()
    for reason in (
        "its script has '0.weight' of float64 and shape [4, 5, 2] where the server's has",
        "what it changed of '0.weight' is not finite",
        "nothing of its is taken from here on",
        f"[client {KILLED}] did not end its turn",
    ):
        assert reason in log
    assert max(sizes[len(sizes) // 2 :]) - max(sizes[: len(sizes) // 2]) < 64 * 2**20
