"""A server's state machine: its numbers against one optimizer, and its answers under any order of messages."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.aggregate import MEAN, Aggregator
from paceline.membership import Membership
from paceline.server.admission import AdmissionRule, BulkSynchronous, ProtocolError, StaleSynchronous
from paceline.server.closing import Applied
from paceline.server.optimizer import build_optimizer
from paceline.server.shard import Shard

NEVER = 10**9
SHAPES = ((3, 4), (), (5,))

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}


def make_shard(rule: AdmissionRule, *, max_updates: int | None = None, aggregator: Aggregator = MEAN) -> Shard:
    parameters = [torch.zeros(shape) for shape in SHAPES]
    return Shard(
        parameters=parameters,
        optimizer=torch.optim.SGD(parameters, lr=1.0),
        rule=rule,
        aggregator=aggregator,
        max_updates=max_updates,
    )


def ones(scale: float = 1.0) -> list[Tensor]:
    return [torch.full(shape, scale) for shape in SHAPES]


# --- the numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_bsp_equals_one_optimizer_with_the_mean_gradient(name: str, n: int) -> None:
    optimizer_class, settings = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(n)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    single = [parameter.clone() for parameter in start]
    # Two groups with rates of their own: the last tensor is alone in the second.
    reference = optimizer_class([{"params": single[:2]}, {"params": single[2:], "lr": 0.003}], **settings)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in reference.param_groups]
    served = [parameter.clone() for parameter in start]
    optimizer = build_optimizer(optimizer_class, reference.defaults, groups, [served[:2], served[2:]])
    shard = Shard(parameters=served, optimizer=optimizer, rule=BulkSynchronous(Membership.first(n)))
    for clock in range(6):
        gradients = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(n)]
        untouched = copy.deepcopy(gradients)
        for worker in reversed(range(n)):
            answers = shard.push(worker, clock, gradients[worker], pause_at=NEVER)
        assert sorted(answer.worker for answer in answers) == list(range(n))
        for index, parameter in enumerate(single):
            parameter.grad = torch.stack([mine[index].double() for mine in gradients]).mean(0).float()
        reference.step()
        torch.testing.assert_close(served, single, rtol=2e-6, atol=2e-7)
        for mine, before in zip(gradients, untouched, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True)), "a worker's memory was written"
    assert shard.iteration == 6


@pytest.mark.parametrize("cut_at", [[4], [1, 5, 8], list(range(1, 12))], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_shards_equal_one(name: str, cut_at: list[int]) -> None:
    """Pieces of a tensor, each a shard that gets its part of every gradient at another time."""
    optimizer_class, settings = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(12, generator=generator)
    randomness = random.Random(len(cut_at))

    def make(parameter: Tensor) -> Shard:
        optimizer = build_optimizer(optimizer_class, settings, [{}], [[parameter]])
        rule = BulkSynchronous(Membership.first(2))
        return Shard(parameters=[parameter], optimizer=optimizer, rule=rule, max_updates=4)

    twin = make(start.clone())
    pieces = torch.tensor_split(torch.arange(12), cut_at)
    shards = [make(start[piece].clone()) for piece in pieces]
    for clock in range(6):
        gradients = [None if clock == 2 and worker else torch.randn(12, generator=generator) for worker in range(2)]
        groups = [{"lr": 0.5}] if clock == 3 else None
        for worker, whole in enumerate(gradients):
            twin.push(worker, clock, None if whole is None else [whole], pause_at=NEVER, groups=groups)
        arrivals = [(worker, index) for worker in range(2) for index in range(len(shards))]
        randomness.shuffle(arrivals)
        for worker, index in arrivals:
            whole = gradients[worker]
            part = None if whole is None else [whole[pieces[index]]]
            shards[index].push(worker, clock, part, pause_at=NEVER, groups=groups)
        assert {shard.iteration for shard in shards} == {twin.iteration}
        joined = torch.cat([shard.parameters[0] for shard in shards])
        torch.testing.assert_close(joined, twin.parameters[0], rtol=2e-6, atol=2e-7)
    assert twin.iteration == 4


def test_updates_are_fused_where_the_script_leaves_the_choice() -> None:
    def choice(optimizer_class: type[torch.optim.Optimizer], dtype: torch.dtype, **settings: Any) -> object:
        built = build_optimizer(optimizer_class, settings, [{}], [[torch.zeros(3, dtype=dtype)]])
        return built.param_groups[0].get("fused")

    assert choice(torch.optim.SGD, torch.float32, lr=0.1) is True
    assert choice(torch.optim.AdamW, torch.float64) is True
    assert choice(torch.optim.Adam, torch.bfloat16) is None
    assert choice(torch.optim.Adam, torch.float32, fused=False) is False
    assert choice(torch.optim.Adam, torch.float32, foreach=True) is None
    assert choice(torch.optim.RMSprop, torch.float32) is None


def test_hyperparameters_that_change_leave_the_kernel_as_it_is() -> None:
    parameter = torch.zeros(3)
    optimizer = build_optimizer(torch.optim.SGD, {"lr": 1.0}, [{}], [[parameter]])
    shard = Shard(parameters=[parameter], optimizer=optimizer, rule=BulkSynchronous(Membership.first(1)))
    shard.push(0, 0, [torch.ones(3)], pause_at=NEVER, groups=[{"lr": 2.0, "fused": None, "foreach": None}])
    assert optimizer.param_groups[0]["fused"] is True
    assert parameter.tolist() == [-2.0] * 3


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_sum_does_not_depend_on_the_order_of_arrival(order: tuple[int, ...]) -> None:
    shard = make_shard(BulkSynchronous(Membership.first(3)))
    # Summed in worker order the large ones cancel first and 1 remains; in another order the 1 is lost.
    for worker in order:
        shard.push(worker, 0, ones((1e9, -1e9, 1.0)[worker]), pause_at=NEVER)
    torch.testing.assert_close(shard.parameters[0], torch.full((3, 4), -1 / 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_averaged_in_float32(dtype: torch.dtype) -> None:
    parameter = torch.zeros(2, dtype=dtype)
    shard = Shard(
        parameters=[parameter],
        optimizer=torch.optim.SGD([parameter], lr=1.0),
        rule=BulkSynchronous(Membership.first(3)),
    )
    # The sum is infinite in float16, and 256 + 1 is 256 in bfloat16.
    gradients = {torch.float16: (60000.0, 60000.0, 60000.0), torch.bfloat16: (256.0, 1.0, 1.0)}[dtype]
    for worker, value in enumerate(gradients):
        shard.push(worker, 0, [torch.full((2,), value, dtype=dtype)], pause_at=NEVER)
    expected = torch.tensor(-sum(gradients) / 3).to(dtype)
    assert torch.equal(parameter, expected.expand(2))
    assert parameter.dtype == dtype


def test_asynchronous_gradients_are_applied_one_by_one() -> None:
    shard = make_shard(StaleSynchronous(Membership.first(2)))
    for number, (worker, clock) in enumerate([(0, 0), (0, 1), (1, 0), (0, 2)], 1):
        (answer,) = shard.push(worker, clock, ones(), pause_at=NEVER)
        assert (answer.worker, answer.iteration, answer.clock) == (worker, number, clock + 1)
        assert torch.equal(shard.parameters[0], torch.full((3, 4), -float(number)))


def test_backup_workers_drop_the_late_gradient() -> None:
    shard = make_shard(BulkSynchronous(Membership.first(3), backup_workers=1))
    assert shard.push(0, 0, ones(3.0), pause_at=NEVER) == []
    assert [answer.worker for answer in shard.push(2, 0, ones(1.0), pause_at=NEVER)] == [0, 2]
    (late,) = shard.push(1, 0, ones(100.0), pause_at=NEVER)
    assert (late.staleness, late.iteration, late.clock, late.admitted) == (-1, 1, 1, True)
    assert torch.equal(shard.parameters[0], torch.full((3, 4), -2.0))
    assert [applied.worker for applied in shard.drain_applied()] == [0, 2]


def test_with_backup_workers_the_first_to_leave_ends_the_run_of_all() -> None:
    shard = make_shard(BulkSynchronous(Membership.first(4), backup_workers=1))
    for worker in (0, 1, 2):
        shard.push(worker, 0, ones(), pause_at=NEVER)
    shard.pulled(0)
    assert shard.push(0, 1, ones(), pause_at=NEVER) == []
    # Worker 1 leaves: worker 0 waits for nobody any more, and worker 3, which missed clock 0, ends with its next push.
    answers = shard.leave(1)
    assert [(a.worker, a.stop, a.staleness, a.iteration) for a in answers] == [(0, True, -1, 1)]
    (late,) = shard.push(3, 0, ones(), pause_at=NEVER)
    assert (late.stop, late.staleness, late.iteration) == (True, -1, 1)
    (last,) = shard.push(2, 1, ones(), pause_at=NEVER)
    assert (last.stop, last.staleness) == (True, -1)
    assert torch.equal(shard.parameters[0], torch.full((3, 4), -1.0))


def test_a_following_shard_waits_for_the_decision_and_for_the_gradients_it_names() -> None:
    deciding = BulkSynchronous(Membership.first(3), backup_workers=1)
    shard = make_shard(deciding.for_another_shard())
    assert shard.follows
    assert shard.push(0, 0, ones(3.0), pause_at=NEVER, stop=True) == []
    assert shard.push(1, 0, ones(100.0), pause_at=0) == []
    assert shard.follow(0, 1, [0, 2]) == [], "the gradient of worker 2 has not come"
    answers = shard.push(2, 0, ones(1.0), pause_at=NEVER)
    assert [answer.worker for answer in answers] == [0], "the others have not said where they go on"
    assert torch.equal(shard.parameters[0], torch.full((3, 4), -2.0))
    assert [answer.worker for answer in shard.follow(2, 1, [0, 2])] == [2]
    (late,) = shard.follow(1, 1, [0, 2])
    assert (late.worker, late.staleness, late.iteration) == (1, -1, 1)
    with pytest.raises(ProtocolError, match="worker 1 goes on at clock 1 without a push"):
        shard.follow(1, 1, [0, 2])


def test_a_following_shard_drops_what_counts_for_nothing() -> None:
    """As it does where another worker waits at a place: the pusher goes on at the clock that it has pushed for."""
    shard = make_shard(BulkSynchronous(Membership.first(3), backup_workers=1).for_another_shard())
    shard.push(1, 0, ones(100.0), pause_at=NEVER)
    (dropped,) = shard.follow(1, 0, [])
    assert (dropped.worker, dropped.clock, dropped.staleness) == (1, 0, -1)
    shard.push(0, 0, ones(3.0), pause_at=NEVER)
    assert shard.follow(0, 1, [0, 1]) == [], "the gradient of worker 1 that counts has not come"
    assert [answer.worker for answer in shard.push(1, 0, ones(1.0), pause_at=NEVER)] == [0]
    assert torch.equal(shard.parameters[0], torch.full((3, 4), -2.0))


def test_a_worker_waits_until_a_following_shard_has_come_to_its_clock() -> None:
    shard = make_shard(BulkSynchronous(Membership.first(3), backup_workers=1).for_another_shard())
    shard.push(2, 0, ones(), pause_at=NEVER)
    assert shard.follow(2, 1, [0, 1]) == [], "here clock 0 is still open"
    shard.push(0, 0, ones(), pause_at=NEVER)
    assert [answer.worker for answer in shard.push(1, 0, ones(), pause_at=NEVER)] == [2]


def test_a_decision_is_refused_by_a_shard_that_decides_for_itself() -> None:
    shard = make_shard(BulkSynchronous(Membership.first(2)))
    assert not shard.follows
    with pytest.raises(ProtocolError, match="decides for itself"):
        shard.follow(0, 1, [0, 1])


def test_a_leaver_completes_the_clock_of_the_others() -> None:
    shard = make_shard(BulkSynchronous(Membership.first(2)))
    assert shard.push(0, 0, ones(), pause_at=NEVER) == []
    (answer,) = shard.leave(1)
    assert (answer.worker, answer.iteration, answer.staleness) == (0, 1, 0)


# --- void gradients, ends, settings, mistakes ----------------------------------------------------------------------


def test_one_void_gradient_voids_the_clock_of_all() -> None:
    shard = make_shard(BulkSynchronous(Membership.first(2)))
    shard.push(0, 0, ones(), pause_at=NEVER)
    answers = shard.push(1, 0, None, pause_at=NEVER)
    assert [(a.worker, a.iteration, a.clock, a.staleness, a.admitted) for a in answers] == [
        (0, 0, 1, -1, True),
        (1, 0, 1, -1, True),
    ]
    assert torch.equal(shard.parameters[0], torch.zeros(3, 4))
    assert shard.drain_applied() == []
    shard.push(1, 1, ones(), pause_at=NEVER)
    assert len(shard.push(0, 1, ones(), pause_at=NEVER)) == 2
    assert shard.iteration == 1


def test_a_void_gradient_is_no_update_but_a_clock() -> None:
    shard = make_shard(StaleSynchronous(Membership.first(2), staleness=0))
    assert shard.push(0, 0, None, pause_at=NEVER) == []
    answers = shard.push(1, 0, ones(), pause_at=NEVER)
    assert [(a.worker, a.iteration, a.staleness) for a in answers] == [(0, 1, -1), (1, 1, 0)]


@pytest.mark.parametrize("rule", [BulkSynchronous, StaleSynchronous])
def test_no_update_beyond_the_last(rule: Callable[..., AdmissionRule]) -> None:
    shard = make_shard(rule(Membership.first(1)), max_updates=2)
    staleness = [shard.push(0, clock, ones(), pause_at=NEVER)[0].staleness for clock in range(4)]
    assert staleness == [0, 1, -1, -1] or staleness == [0, 0, -1, -1]
    assert shard.iteration == 2
    assert torch.equal(shard.parameters[0], torch.full((3, 4), -2.0))


def test_hyperparameters_hold_from_the_gradient_they_came_with() -> None:
    shard = make_shard(StaleSynchronous(Membership.first(1)))
    shard.push(0, 0, ones(), pause_at=NEVER)
    shard.push(0, 1, ones(), pause_at=NEVER, groups=[{"lr": 10.0}])
    assert torch.equal(shard.parameters[2], torch.full((5,), -11.0))
    shard.push(0, 2, ones(), pause_at=NEVER)
    assert torch.equal(shard.parameters[2], torch.full((5,), -21.0))


def test_each_gradient_is_applied_with_its_own_workers_hyperparameters() -> None:
    shard = make_shard(StaleSynchronous(Membership.first(2)))
    shard.push(0, 0, ones(), pause_at=NEVER, groups=[{"lr": 10.0}])
    shard.push(1, 0, ones(), pause_at=NEVER)
    assert torch.equal(shard.parameters[2], torch.full((5,), -11.0))
    shard.push(0, 1, ones(), pause_at=NEVER)
    assert torch.equal(shard.parameters[2], torch.full((5,), -21.0))


def test_a_late_worker_does_not_turn_the_hyperparameters_back() -> None:
    shard = make_shard(BulkSynchronous(Membership.first(3), backup_workers=1))
    for worker in (0, 1):
        shard.push(worker, 0, ones(), pause_at=NEVER, groups=[{"lr": 10.0}])
    shard.push(2, 0, ones(), pause_at=NEVER, groups=[{"lr": 100.0}])
    assert torch.equal(shard.parameters[2], torch.full((5,), -10.0))
    shard.push(2, 1, ones(), pause_at=NEVER)
    shard.push(0, 1, ones(), pause_at=NEVER, groups=[{"lr": 1.0}])
    assert torch.equal(shard.parameters[2], torch.full((5,), -11.0))


def test_a_refused_push_changes_no_hyperparameter() -> None:
    shard = make_shard(StaleSynchronous(Membership.first(1)))
    with pytest.raises(ProtocolError):
        shard.push(0, 7, ones(), pause_at=NEVER, groups=[{"lr": 10.0}])
    with pytest.raises(ProtocolError, match="2 parameter groups"):
        shard.push(0, 0, ones(), pause_at=NEVER, groups=[{"lr": 1.0}, {"lr": 1.0}])
    shard.push(0, 0, ones(), pause_at=NEVER)
    assert torch.equal(shard.parameters[2], torch.full((5,), -1.0))


@pytest.mark.parametrize(
    "gradients",
    [[torch.ones(4, 3), torch.ones(()), torch.ones(5)], [torch.ones(3, 4)], []],
    ids=["transposed", "too few", "none"],
)
def test_mismatched_shapes_are_refused_and_change_nothing(gradients: Sequence[Tensor]) -> None:
    shard = make_shard(BulkSynchronous(Membership.first(2)))
    with pytest.raises(ProtocolError, match=r"worker 1 pushed gradients of shapes .* this server owns"):
        shard.push(1, 0, gradients, pause_at=NEVER)
    shard.push(0, 0, ones(), pause_at=NEVER)
    assert len(shard.push(1, 0, ones(), pause_at=NEVER)) == 2


def test_asking_for_admission_with_a_held_gradient_is_refused() -> None:
    shard = make_shard(BulkSynchronous(Membership.first(2)))
    shard.push(0, 0, ones(), pause_at=NEVER)
    with pytest.raises(ProtocolError, match="worker 0 asks for admission while its gradient waits"):
        shard.wait(0, pause_at=NEVER)
    assert len(shard.push(1, 0, ones(), pause_at=NEVER)) == 2
    assert shard.iteration == 1, "the held gradient was not forgotten"


def test_a_worker_that_left_may_not_ask() -> None:
    shard = make_shard(StaleSynchronous(Membership.first(2), staleness=1))
    shard.leave(1)
    with pytest.raises(ProtocolError):
        shard.wait(1, pause_at=NEVER)


def test_the_word_to_stop_reaches_also_the_worker_that_waits_for_admission() -> None:
    shard = make_shard(StaleSynchronous(Membership.first(2), staleness=0))
    assert shard.push(0, 0, ones(), pause_at=NEVER) == []
    shard.push(1, 0, ones(), pause_at=NEVER)
    assert shard.push(0, 1, ones(), pause_at=NEVER) == []
    shard.leave(1)
    shard = make_shard(StaleSynchronous(Membership.first(3), staleness=0))
    assert shard.push(0, 0, ones(), pause_at=NEVER) == []
    answers = shard.push(1, 0, ones(), pause_at=NEVER, stop=True)
    # Worker 2 has not come, so neither is admitted; but neither needs to be.
    assert [(a.worker, a.stop, a.admitted) for a in answers] == [(0, True, False), (1, True, False)]


def test_the_word_to_stop_does_not_release_a_held_gradient() -> None:
    shard = make_shard(BulkSynchronous(Membership.first(2)))
    assert shard.push(0, 0, ones(), pause_at=NEVER, stop=True) == []
    answers = shard.push(1, 0, ones(), pause_at=NEVER)
    assert [(a.worker, a.stop, a.admitted, a.staleness) for a in answers] == [(0, True, True, 0), (1, True, True, 0)]


def test_a_pause_answers_who_is_not_admitted() -> None:
    shard = make_shard(StaleSynchronous(Membership.first(2), staleness=0))
    assert shard.push(0, 0, ones(), pause_at=2) == []
    (answer,) = shard.wait(0, pause_at=1)
    assert (answer.iteration, answer.admitted) == (1, False)
    assert shard.wait(0, pause_at=2) == []
    answers = shard.push(1, 0, ones(), pause_at=2)
    assert [(a.worker, a.admitted) for a in answers] == [(0, True), (1, True)]


# --- staleness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_asp_staleness_at_constant_speed_is_n_minus_one(n: int) -> None:
    shard = make_shard(StaleSynchronous(Membership.first(n)))
    clocks = [0] * n
    for _ in range(20):
        for worker in range(n):
            (answer,) = shard.push(worker, clocks[worker], ones(), pause_at=NEVER)
            shard.pulled(worker)
            clocks[worker] = answer.clock
    applied = shard.drain_applied()
    assert [one.staleness for one in applied[:n]] == list(range(n))
    assert {one.staleness for one in applied[n:]} == {n - 1}
    assert applied[-1] == Applied(iteration=20 * n, worker=n - 1, clock=19, staleness=n - 1)
    assert shard.drain_applied() == []


def test_who_leaves_is_not_answered_and_its_gradient_counts_as_it_was() -> None:
    shard = make_shard(BulkSynchronous(Membership.first(2)))
    memory = ones(2.0)
    shard.push(0, 0, memory, pause_at=NEVER)
    assert shard.leave(0) == []
    for tensor in memory:
        tensor.fill_(100.0)
    assert [answer.worker for answer in shard.push(1, 0, ones(4.0), pause_at=NEVER)] == [1]
    torch.testing.assert_close(shard.parameters, ones(-3.0))
