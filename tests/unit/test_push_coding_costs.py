"""What coding takes workers, servers and clients where each tensor is coded by itself: by hand, in plans, and in
simulated runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cluster.description import Cluster, Communication, Compute, Hosts, Servers
from paceline.codec import BF16, Int8, RandomK, TensorCodec
from paceline.layout import TensorSpec, by_group
from paceline.planner import StepWork, predict
from paceline.planner.simulator import simulate
from paceline.server.coded_push import CodedPushes, PushCoding, push_coding_s
from paceline.server.ranges import cut, in_shards
from paceline.strategies.federated import uploading
from tests.conformance.test_virtual_costs import step_s
from tests.conformance.virtual_cluster import PLAIN, run, tiny

OPERATION_S = 50e-6
BESIDE = Servers(placement="with workers")
WORK = StepWork(tensor_bytes=(160, 16), tensor_shapes=((4, 10), (4,)), samples=4)


def costly(*, hosts: Hosts | None = None, coding_us: float = OPERATION_S * 1e6, **more: Any) -> Cluster:
    """Hosts whose links take next to nothing, and whose operations of codecs take long."""
    alike = hosts or Hosts(count=12, bandwidth_gbit_per_s=1000.0, latency_us=0.0, memory_gbyte_per_s=1e6)
    costs = Communication(coding_us=coding_us)
    return Cluster(hosts=(alike,), compute=Compute(step_s=0.01), communication=costs, **more)


def more_s(out: Path, strategy: str, workers: int, options: dict[str, Any], **more: Any) -> float:
    """How much longer a simulated step is where operations take time."""
    taken_s = [
        step_s(
            run(
                tiny,
                out / str(coding_us),
                strategy,
                workers,
                cluster=costly(coding_us=coding_us, **more),
                options=options,
                max_steps=12,
            )
        )
        for coding_us in (OPERATION_S * 1e6, 0.0)
    ]
    return taken_s[0] - taken_s[1]


def apart_s(codec: TensorCodec, num_tensors: float = 1) -> tuple[float, float]:
    """What operations take of encoding and decoding a push."""
    return push_coding_s(codec, 0.0, num_tensors=num_tensors, operation_s=OPERATION_S)


@pytest.mark.parametrize("codec", [BF16(feedback=False), Int8(), RandomK()], ids=str)
def test_bytes_and_operations_of_each_tensor_add_up(codec: TensorCodec) -> None:
    (encode, decode), again = codec.seconds_per_gbyte, codec.feedback  # what is left out is found by decoding
    by_bytes = push_coding_s(codec, 2e9, num_tensors=3, operation_s=0.0)
    assert by_bytes == pytest.approx((2 * (encode + again * decode), 2 * decode))
    one, three = apart_s(codec), apart_s(codec, 3)
    assert three == pytest.approx((3 * one[0], 3 * one[1]))
    both = push_coding_s(codec, 2e9, num_tensors=3, operation_s=OPERATION_S)
    assert both == pytest.approx((by_bytes[0] + three[0], by_bytes[1] + three[1]))


def test_what_is_kept_takes_operations() -> None:
    """To add it, to find what is left of it by decoding, and to keep that."""
    without, kept = (push_coding_s(BF16(feedback=each), 0.0, num_tensors=1, operation_s=1.0) for each in (False, True))
    assert kept[0] >= without[0] + 4
    assert kept[1] == without[1]


@pytest.mark.parametrize("beside", [False, True])
def test_a_worker_spends_what_its_pieces_take(beside: bool) -> None:
    """What the server reads in place the worker decodes, unless it is the server that takes the time for it."""
    layout = by_group([TensorSpec("weight", (6000,), torch.float32)])
    (pieces,) = cut(layout, num_servers=1, whole_tensors=False, piece_bytes=8192)
    shards, spent = in_shards(pieces, whole=False), list[float]()
    gradients = [[torch.ones(piece.stop - piece.start) for piece in shard] for shard in shards]
    coding = PushCoding(Int8(feedback=False), 0, beside=beside, spend=spent.append, operation_s=OPERATION_S)
    pushes = CodedPushes(coding, layout, shards, gradients, server=0, rank=0)
    pushes.encode(step=0, stands_in=False)
    pushes.decode_in_place(by_server=not beside)
    takes_s = push_coding_s(coding.codec, 24_000.0, num_tensors=3, operation_s=OPERATION_S)
    assert spent == pytest.approx(takes_s if beside else takes_s[:1], rel=0.01)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_server_decodes_one_push_after_the_other(workers: int, tmp_path: Path) -> None:
    encode_s, decode_s = apart_s(Int8())
    found_s = more_s(tmp_path, "ps-bsp", workers, {"codec": "int8", **PLAIN})
    assert found_s == pytest.approx(encode_s + workers * decode_s, rel=0.01)


def test_workers_of_a_core_encode_in_turns(tmp_path: Path) -> None:
    """And the server decodes on the same one."""
    encode_s, decode_s = apart_s(Int8())
    options = {"codec": "int8", **PLAIN}
    found_s = more_s(tmp_path, "ps-bsp", 2, options, shared_cores=1)
    assert found_s == pytest.approx(2 * (encode_s + decode_s), rel=0.05)


def test_a_server_beside_gets_gradients_as_they_are(tmp_path: Path) -> None:
    """Of two servers each worker has one on its host, unless all is to be coded."""
    options = {"codec": "int8", "servers": 2, **PLAIN}
    encode_s, decode_s = apart_s(Int8())
    found_s = more_s(tmp_path / "links", "ps-bsp", 2, options, servers=BESIDE)
    assert found_s == pytest.approx(encode_s + decode_s, rel=0.01)
    found_s = more_s(tmp_path / "all", "ps-bsp", 2, {**options, "codec_scope": "all"}, servers=BESIDE)
    assert found_s == pytest.approx(2 * (encode_s + decode_s), rel=0.01)


CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("ps-bsp", 3, {"codec": "int8"}, {}),
    ("ps-bsp", 3, {"codec": "int8", "servers": 3}, {"servers": BESIDE}),
    ("ps-bsp", 3, {"codec": "int8", "servers": 3, "codec_scope": "all"}, {"servers": BESIDE}),
    ("ps-bsp", 4, {"codec": "top-k"}, {"shared_cores": 2}),
    ("ps-bsp", 4, {"codec": "int8", "servers": 4}, {"servers": BESIDE, "shared_cores": 1}),
    ("ps-asp", 3, {"codec": "int8"}, {}),
    ("ps-ssp", 3, {"codec": "bf16", "servers": 2}, {}),
]


@pytest.mark.parametrize(("strategy", "workers", "options", "more"), CASES)
def test_plans_and_simulated_runs_count_operations_alike(
    strategy: str, workers: int, options: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    slow, quick = costly(**more), costly(coding_us=0.0, **more)
    asked: dict[str, Any] = {"strategy": strategy, "workers": workers, "work": WORK, "options": options}
    found = predict(slow, **asked)
    assert found.step_s > 1.1 * predict(quick, **asked).step_s
    given = options | (PLAIN if strategy == "ps-bsp" else {})
    result = run(tiny, tmp_path, strategy, workers, cluster=slow, options=given, max_steps=60)
    own_s = [step.time_s for step in result.steps if step.worker == 0]
    for taken_s in (simulate(slow, **asked, steps=40).step_s, (own_s[-1] - own_s[2]) / (len(own_s) - 3)):
        assert 0.95 * found.step_s_low <= taken_s <= 1.05 * found.step_s_high


def test_each_turn_of_a_client_takes_the_operations_of_its_change(tmp_path: Path) -> None:
    """Six clients on two workers take three turns a round each, one after the other."""
    options = {"clients": 6, "fraction": 1, "codec": "int8", "optimizer": "kept"}
    work = replace(WORK, data_samples=96)
    turn_s = uploading.coding_s(Int8(), 0.0, num_tensors=2, operation_s=OPERATION_S)
    assert turn_s > 10 * OPERATION_S
    ended_s, planned_s = [], []
    for number, cluster in enumerate((costly(), costly(coding_us=0.0))):
        planned_s.append(predict(cluster, strategy="fed-avg", workers=2, work=work, options=options).iteration_s)
        result = run(tiny, tmp_path / str(number), "fed-avg", 2, cluster=cluster, options=options, max_steps=3)
        ended_s.append(max(step.time_s for step in result.steps) / 3)
    assert planned_s[0] - planned_s[1] == pytest.approx(3 * turn_s)
    assert ended_s[0] - ended_s[1] == pytest.approx(3 * turn_s)
    shared_s = [
        predict(each, strategy="fed-avg", workers=2, work=work, options=options).iteration_s
        for each in (costly(shared_cores=1), costly(coding_us=0.0, shared_cores=1))
    ]
    assert shared_s[0] - shared_s[1] == pytest.approx(2 * 3 * turn_s)
