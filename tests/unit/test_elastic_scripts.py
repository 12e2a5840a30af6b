"""What a script may do in an elastic run, and what is refused in words: worlds of one, in which nobody dies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.config import RunConfig
from paceline.elastic import Elastic
from paceline.engines.world import alone
from paceline.errors import UsageError
from paceline.records import NullReporter
from paceline.strategies import build
from paceline.training.given import told_apart
from paceline.training.session import Session

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


class NobodyComesOrGoes:
    joins = is_asked_to_leave = False
    asked_to_give = ()

    def __call__(self, member):
        raise AssertionError(member)


SESSIONS: list[Session] = []


def session_of(global_batch: str = "keep", *, strategy: str = "all-reduce", **options: object) -> Session:
    context = replace(alone().context, device=torch.device("cpu"), reform=NobodyComesOrGoes())
    config = RunConfig(elastic=Elastic(at_least=1, at_most=1, global_batch=global_batch))
    SESSIONS.append(Session(context, build(strategy, options), config, NullReporter()))
    return SESSIONS[-1]


@pytest.fixture(autouse=True)
def sessions_are_released() -> Iterator[None]:
    """Else they would go on to look at what other tests do."""
    yield
    while SESSIONS:
        SESSIONS.pop().release()


def prepared(session: Session, model: nn.Module, optimizer=None, data=None, **extra):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data if data is not None else TensorDataset(X), batch_size=3)
    [sharded] = session.prepare(told_apart((model, optimizer, loader), extra)).values()
    return optimizer, sharded


def step(model: nn.Module, optimizer, batch) -> None:
    optimizer.zero_grad()
    model(batch[0]).square().mean().backward()
    optimizer.step()


def test_undisturbed_it_trains_as_a_static_run() -> None:
    torch.manual_seed(0)
    elastic, plain = nn.Linear(4, 2), nn.Linear(4, 2)
    plain.load_state_dict(elastic.state_dict())
    session = session_of()
    optimizer, loader = prepared(session, elastic)
    update = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for batch, expected in zip(loader, X.split(3), strict=True):
            step(elastic, optimizer, batch)
            step(plain, update, [expected])
    session.finish()
    torch.testing.assert_close(elastic.weight, plain.weight)


def test_skipped_batches_and_passes_left_early_are_as_in_static_runs() -> None:
    model = nn.Linear(4, 2)
    session = session_of()
    optimizer, loader = prepared(session, model)
    for number, batch in enumerate(loader):
        if number == 2:
            break
        step(model, optimizer, batch)
    assert [len(batch[0]) for batch in loader] == [3, 3, 3, 3]


def two_backwards(model, optimizer, batch) -> None:
    model(batch[0]).mean().backward()
    step(model, optimizer, batch)


def with_closure(model, optimizer, batch) -> None:
    optimizer.step(lambda: model(batch[0]).square().mean())


@pytest.mark.parametrize(
    ("loop", "words"), [(two_backwards, "call backward\\(\\) once a step"), (with_closure, "calls a closure")]
)
def test_steps_that_cannot_be_repeated(loop, words: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters()) if loop is with_closure else None
    optimizer, loader = prepared(session_of(), model, optimizer)
    batch = next(iter(loader))
    with pytest.raises(UsageError, match=words):
        loop(model, optimizer, batch)


def test_batches_read_ahead_and_no_sync() -> None:
    model, session = nn.Linear(4, 2), session_of()
    optimizer, loader = prepared(session, model)
    batches = iter(loader)
    first, _ = next(batches), next(batches)
    with pytest.raises(UsageError, match="train on each batch once, before the next one"):
        step(model, optimizer, first)
    with pytest.raises(UsageError, match="no_sync"), session.no_sync():
        pass
    with pytest.raises(UsageError, match="could not be repeated when a worker dies"):
        session.require_same_step("all_reduce")


def test_rounds_end_with_each_pass() -> None:
    """Where data are dealt anew, all of a pass are to be trained on before the next one."""
    model = nn.Linear(4, 2)
    session = session_of("grow", strategy="local-sgd", every=3)
    optimizer, loader = prepared(session, model)
    iterations = []
    for _ in range(2):
        for batch in loader:
            step(model, optimizer, batch)
            iterations.append(session.run.iteration)
    assert iterations == [0, 0, 1, 1, 2, 2, 3, 3]
    session.finish()
    assert (session.run.iteration, session._survivor.all_done.now) == (4, (24, 8))


def test_rounds_end_with_a_pass_that_the_script_leaves() -> None:
    model = nn.Linear(4, 2)
    session = session_of("grow", strategy="local-sgd", every=3)
    optimizer, loader = prepared(session, model)
    iterations = []
    for _ in range(3):
        for number, batch in enumerate(loader):
            step(model, optimizer, batch)
            iterations.append(session.run.iteration)
            if number == 1:
                break
    assert iterations == [0, 0, 1, 1, 2, 2]
    session.finish()
    assert (session.run.iteration, session._survivor.all_done.now) == (3, (18, 6))


def test_workers_meet_between_rounds_alone() -> None:
    model = nn.Linear(4, 2)
    session = session_of("grow", strategy="local-sgd", every=3)
    optimizer, loader = prepared(session, model)
    for batch, is_within in zip(loader, (True, True, False, True), strict=True):
        step(model, optimizer, batch)
        if is_within:
            with pytest.raises(UsageError, match="in the middle of a round"), session.course.meeting("validation"):
                pass
        else:
            with session.course.meeting("validation"):
                assert session.run.iteration == 1
    with session.course.meeting("validation"):
        assert session.run.iteration == 2


def test_batches_read_ahead_of_an_exchange() -> None:
    model, session = nn.Linear(4, 2), session_of("grow", strategy="local-sgd", every=1)
    optimizer, loader = prepared(session, model)
    batches = iter(loader)
    first, _ = next(batches), next(batches)
    with pytest.raises(UsageError, match="train on each batch once, before the next one"):
        step(model, optimizer, first)


class Stream(IterableDataset):
    def __iter__(self):
        yield from X


def test_data_that_cannot_be_dealt_anew() -> None:
    with pytest.raises(UsageError, match="use a map-style data set"):
        prepared(session_of(), nn.Linear(4, 2), data=Stream())


def test_several_optimizers() -> None:
    a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    named = {
        "a": a,
        "b": b,
        "one": torch.optim.SGD(a.parameters(), lr=0.1),
        "two": torch.optim.SGD(b.parameters(), lr=0.1),
        "data": DataLoader(TensorDataset(X), batch_size=3),
    }
    with pytest.raises(UsageError, match="one optimizer and one loader so far"):
        session_of().prepare(told_apart((), named))


def test_schedulers_are_prepared_where_updates_take_several_steps() -> None:
    for global_batch, given, is_refused in [("keep", False, True), ("keep", True, False), ("grow", False, False)]:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        before = scheduler.state_dict()
        session = session_of(global_batch)
        _, loader = prepared(session, model, optimizer, **({"scheduler": scheduler} if given else {}))
        assert scheduler.state_dict().keys() == before.keys()
        if is_refused:
            with pytest.raises(UsageError, match=r"give it to worker\.prepare"):
                next(iter(loader))
            continue
        for batch in loader:
            step(model, optimizer, batch)
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "ps-bsp:backup_workers=1"}, "strategy ps-bsp cannot go on without a worker that dies"),
        ({"strategy": "ps-asp:torn_reads=true"}, "ps-asp without backup_workers, torn_reads"),
        ({"strategy": "ps-asp", "global_batch": "keep"}, "each gradient is an update of its own"),
        ({"strategy": "ps-ssp", "global_batch": "keep"}, "no global batch is ever complete; use --global-batch grow"),
        ({"strategy": "ps-bsp:aggregate=trimmed-mean:aggregate.byzantine=0", "elastic": "3:4"}, "would start with"),
        (
            {"strategy": "ps-bsp:aggregate=krum:aggregate.byzantine=1", "workers": 4, "elastic": "3:5"},
            "may come to have 3 workers, for which .*aggregate=krum:byzantine=1: byzantine=1 needs 4 contributions",
        ),
        (
            {"strategy": "ps-bsp:aggregate=bulyan:aggregate.byzantine=1", "workers": 7, "elastic": "6:8"},
            "may come to have 6 workers, for which .*byzantine=1 needs 7 contributions",
        ),
        ({"strategy": "ps-bsp:aggregate=fools-gold"}, "remembers what each worker has sent, which servers do not keep"),
        ({"strategy": "all-reduce:aggregate=fools-gold"}, "takes no aggregate that remembers"),
        ({"strategy": "local-sgd:aggregate=fools-gold"}, "takes no aggregate that remembers"),
        ({"strategy": "fed-avg:aggregate=fools-gold"}, "takes no aggregate that remembers"),
        (
            {"strategy": "all-reduce:aggregate=krum:aggregate.byzantine=1", "workers": 4, "elastic": "3:5"},
            "may come to have 3 workers, for which .*aggregate=krum:byzantine=1: byzantine=1 needs 4 contributions",
        ),
        ({"strategy": "fed-avg", "global_batch": "keep"}, "a round has the samples of its clients, whoever plays them"),
        (
            {"strategy": "ad-psgd", "elastic": "2:4"},
            "may come to have 3 workers, for which .* who ask and those who answer",
        ),
        (
            {"strategy": "gossip:topology=hypercube", "elastic": "2:4"},
            "may come to have 3 workers, for which .*: a hypercube has a power of two .* exponential takes any number",
        ),
        ({"strategy": "gossip", "global_batch": "keep"}, "as many local steps of each worker"),
        (
            {"strategy": "local-sgd", "global_batch": "keep"},
            "as many local steps of each worker.* use --global-batch grow",
        ),
        (
            {"attack": "sign-flip:workers=1", "workers": 3, "elastic": "1:3"},
            r"may come to have 1 workers, for which .*sign-flip leaves none of 1 worker\(s\) honest",
        ),
        (
            {"attack": "alie", "workers": 4, "elastic": "3:4", "strategy": "ps-bsp"},
            "may come to have 3 workers, for which .*under this strategy workers do not see what others",
        ),
        ({"elastic": "3:4"}, "is for 3 to 4 workers, and the run would start with --workers 2"),
        ({"elastic": None, "replace": 1}, "--replace has no effect without --elastic"),
        ({"replace": -1}, "--replace must be 0 or more"),
        ({"elastic": None, "global_batch": "grow"}, "no effect without --elastic"),
        ({"global_batch": "shrink"}, "must be keep or grow, not 'shrink'"),
    ],
)
def test_runs_in_which_nobody_may_die(options, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        paceline.run(lambda: None, **{"workers": 2, "elastic": "1:2", **options})
