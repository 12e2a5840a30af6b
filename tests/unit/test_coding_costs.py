"""What coding takes of a core: for its bytes, and for each operation that it calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cluster.description import Cluster, Communication, Compute, Hosts
from paceline.codec import BF16, Codec, Int8, OneBit, PowerSGD, RandomK, TopK
from paceline.codec.costs import Speed, coding_s, message_coding_s, num_operations, operation_s
from paceline.codec.joining import Region, parts_of
from paceline.planner import StepWork, predict
from paceline.probing import coding
from tests.conformance.test_virtual_costs import step_s
from tests.conformance.virtual_cluster import run, tiny

SHAPES = [(64, 64), (64,), (10, 64)]
TENSOR_CODECS: list[Codec] = [BF16(), Int8(), OneBit(), TopK(), RandomK()]
COUNT = 64 * 64 + 64 + 640


@pytest.mark.parametrize("codec", TENSOR_CODECS, ids=lambda codec: codec.name)
def test_operations_follow_what_is_exchanged(codec: Codec) -> None:
    """Parts and payloads are as many as workers; what is added as it is does not become more with them."""
    two, four, eight = (num_operations(codec, SHAPES, size) for size in (2, 4, 8))
    assert eight - four == pytest.approx(2 * (four - two))
    assert (eight > two) is not codec.linear


def test_a_large_tensor_in_pieces_takes_more_operations() -> None:
    small, large = (num_operations(Int8(), [(count,)], 2) for count in (2 << 10, 2 << 19))
    assert large == 4 * small
    assert num_operations(TopK(), [(2 << 19,)], 2) == num_operations(TopK(), [(2 << 10,)], 2)


@pytest.mark.parametrize("codec", [PowerSGD(rank=1), Int8(scales="rows")], ids=lambda codec: codec.name)
def test_codecs_that_see_tensors_take_operations_for_each(codec: Codec) -> None:
    assert num_operations(codec, SHAPES * 4, 2) > 2.5 * num_operations(codec, SHAPES, 2)


def test_counting_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    num_operations(RandomK(ratio=0.37), SHAPES, 2)
    num_operations(PowerSGD(rank=3), SHAPES, 2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_each_operation_counts_besides_bytes() -> None:
    codec, speed = Int8(), Speed(1.0, 2.0, operation_s=1e-3)
    by_bytes_s = coding_s(codec, COUNT, 2, speed=Speed(1.0, 2.0), shapes=SHAPES)
    operations = num_operations(codec, SHAPES, 2)
    assert coding_s(codec, COUNT, 2, speed=speed, shapes=SHAPES) == pytest.approx(by_bytes_s + operations * 1e-3)
    assert coding_s(codec, COUNT, 2) == coding_s(codec, COUNT, 2, speed=Speed.said(codec))
    encode_s, decode_s = message_coding_s(codec, speed, 4e9)
    assert encode_s > 4.005
    assert decode_s > 8.003


def test_a_probe_times_an_operation() -> None:
    assert 1e-7 < coding.operation_s() < 1e-3


@pytest.mark.parametrize("codec", [Int8(), PowerSGD()], ids=lambda codec: codec.name)
def test_an_operation_is_timed(codec: Codec) -> None:
    assert 1e-7 < operation_s(codec) < 1e-2


@pytest.mark.parametrize("size", [2, 4, 8, 32, 64])
def test_a_codec_of_tensors_has_some_to_code_among_any_number(size: int) -> None:
    """Each has every tensor to encode, and the worker with most of them to join decodes everybody's."""
    shapes = [(64, 64), (64,), (10, 64)] * 4
    num_most = max(map(len, parts_of(Int8(scales="rows"), [Region(0, shape) for shape in shapes], size)))
    assert num_operations(Int8(scales="rows"), shapes, size) > len(shapes) + num_most * size


CASES: list[tuple[str, dict[str, Any]]] = [
    ("all-reduce", {"codec": "int8"}),
    ("all-reduce", {"codec": "int8:scales=rows"}),
    ("all-reduce", {"codec": "top-k"}),
    ("all-reduce", {"codec": "powersgd:start=0"}),
    ("local-sgd", {"codec": "int8", "every": 3}),
    ("gossip", {"codec": "int8"}),
]


@pytest.mark.parametrize(("strategy", "options"), CASES)
@pytest.mark.parametrize("shared_cores", [None, 2])
def test_plans_and_simulated_runs_count_operations_alike(
    strategy: str, options: dict[str, Any], shared_cores: int | None, tmp_path: Path
) -> None:
    hosts = Hosts(count=4, bandwidth_gbit_per_s=10.0, latency_us=1.0, memory_gbyte_per_s=100.0)
    slow = Cluster(
        hosts=(hosts,),
        compute=Compute(step_s=0.001),
        communication=Communication(coding_us=50.0),
        shared_cores=shared_cores,
    )
    work = StepWork(tensor_bytes=(160, 16), tensor_shapes=((4, 10), (4,)), samples=4)
    found, quick = (
        predict(each, strategy=strategy, workers=4, work=work, options=options)
        for each in (slow, replace(slow, communication=Communication()))
    )
    assert found.step_s > 1.5 * quick.step_s
    result = run(tiny, tmp_path, strategy, 4, cluster=slow, options=options, max_steps=12)
    assert step_s(result) == pytest.approx(found.step_s, rel=0.05 if shared_cores is None else 0.2)


def test_auto_leaves_a_codec_out_whose_operations_take_longer_than_its_bytes_save(tmp_path: Path) -> None:
    hosts = Hosts(count=4, bandwidth_gbit_per_s=0.01, latency_us=1.0, memory_gbyte_per_s=100.0)
    quick = Cluster(hosts=(hosts,), compute=Compute(step_s=0.001))
    slow = replace(quick, communication=Communication(coding_us=50.0))
    work = StepWork(tensor_bytes=(8_000, 16), tensor_shapes=((2_000,), (4,)), samples=4)
    plain, with_codec, chosen = (
        predict(slow, strategy="all-reduce", workers=4, work=work, options=options).step_s
        for options in ({}, {"codec": "int8"}, {"codec": "auto:among=int8"})
    )
    assert chosen == plain < with_codec
    given = {"strategy": "all-reduce", "workers": 4, "work": work}
    assert (
        predict(quick, **given, options={"codec": "auto:among=int8"}).step_s  # type: ignore[arg-type]
        < predict(quick, **given).step_s  # type: ignore[arg-type]
    )
