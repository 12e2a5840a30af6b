"""What every codec promises: bytes, what it leaves out, and its mean."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from paceline import pieces
from paceline.codec import (
    BF16,
    DCT,
    FP8,
    FP16,
    QSGD,
    Codec,
    ErrorFeedback,
    Form,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    SharedEstimate,
    Sign,
    TensorCodec,
    TernGrad,
    TopK,
    as_bytes,
    memory_of,
    num_bytes,
    owed,
)
from paceline.codec import bits as packing
from paceline.errors import UsageError

ALL = [cls() for cls in pieces.named(Codec).values() if issubclass(cls, TensorCodec)]
CODECS = [*ALL, Int8(scales="rows"), QSGD(bits=2), QSGD(bits=8, size=3), TopK(ratio=0.3), DCT(edge=8, keep=3, decay=1)]
SEEDS = range(200_000, 204_000)  # one element in 16,000 is beyond 4 standard errors; of these seeds, none of 1,000
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- bytes -----------------------------------------------------------------------------------------------------------


@each_codec
@pytest.mark.parametrize("shape", [(1,), (7,), (256,), (1000,), (12, 34), (3, 5, 7), (), (0,), (4, 0)], ids=str)
def test_bytes_are_counted_and_read_again(codec: TensorCodec, shape: tuple[int, ...]) -> None:
    tensor = random(*shape)
    payload = codec.encode(tensor, seed=3)
    assert codec.num_bytes(shape) == num_bytes(payload) == as_bytes(payload).numel() == Form.of(payload).num_bytes
    again = Form.of(codec.encode(torch.zeros_like(tensor), seed=4)).read(as_bytes(payload))
    decoded = codec.decode(again, tensor, seed=3)
    assert torch.equal(decoded, codec.decode(payload, tensor, seed=3))
    assert decoded.shape == tensor.shape
    assert decoded.dtype == tensor.dtype


@each_codec
def test_how_elements_lie_in_memory_makes_no_difference(codec: TensorCodec) -> None:
    tensor = random(4, 3, 5, 2)
    apart = tensor.to(memory_format=torch.channels_last)
    payload, other = codec.encode(tensor, seed=3), codec.encode(apart, seed=3)
    assert torch.equal(codec.decode(payload, tensor, seed=3), codec.decode(other, apart, seed=3))


@pytest.mark.parametrize(
    ("codec", "per_element"),
    [
        (FP16(), 2),
        (BF16(), 2),
        (Int8(), 1 + 4 / 256),  # 1.016
        (FP8(), 1 + 4 / 256),
        (QSGD(), 0.5 + 4 / 512),
        (TernGrad(), 0.25 + 4 / 512),
        (OneBit(), 1 / 8 + 4 / 2048),
        (Sign(), 1 / 8),
        (TopK(ratio=0.25), 0.25 * 8),
        (RandomK(ratio=0.25), 0.25 * 4),
        (DCT(), 32 * 6 / 4096),
    ],
    ids=str,
)
def test_bytes_an_element(codec: TensorCodec, per_element: float) -> None:
    assert num_bytes(codec.encode(random(8192), seed=0)) == 8192 * per_element


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 8, 13, 64])
def test_codes_are_packed_from_the_lowest_bits_on(bits: int, count: int) -> None:
    codes = torch.randint(1 << bits, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    packed = packing.pack(codes, bits)
    assert packed.numel() == packing.num_bytes(count, bits)
    assert torch.equal(packing.unpack(packed, bits, count), codes)
    whole = sum(code << bits * place for place, code in enumerate(codes.tolist()))
    assert packed.tolist() == list(whole.to_bytes(packed.numel(), "little"))


def test_a_payload_of_another_size_is_refused() -> None:
    payload = Int8().encode(random(300), seed=0)
    with pytest.raises(ValueError, match="308"):
        Form.of(payload).read(as_bytes(payload)[:-1])
    with pytest.raises((IndexError, RuntimeError)):
        TopK().decode((torch.ones(1), torch.tensor([300], dtype=torch.int32)), random(300), seed=0)


@each_codec
def test_a_flat_tensor_cut_at_whole_blocks_has_the_same_payload(codec: TensorCodec) -> None:
    """So ranges may be encoded by themselves; codecs that choose, or draw, among all elements aside."""
    if codec.unbiased or isinstance(codec, TopK):
        return
    tensor = random(4 * max(codec.block, 64))
    cut = tensor.numel() // 2
    halves = [codec.decode(codec.encode(part, seed=0), part, seed=0) for part in (tensor[:cut], tensor[cut:])]
    assert torch.equal(torch.cat(halves), codec.decode(codec.encode(tensor, seed=0), tensor, seed=0))


# --- what is left out ------------------------------------------------------------------------------------------------


@each_codec
@pytest.mark.parametrize("trouble", [math.inf, math.nan, 1e30])
def test_a_tensor_that_cannot_be_held_leaves_the_next_ones_alone(codec: TensorCodec, trouble: float) -> None:
    if not codec.feedback:
        return
    memory, tensor = memory_of(codec), random(600)
    bad = tensor.clone()
    bad[5] = trouble
    _, kept = memory.encode(codec, bad, memory.start(bad), seed=0)
    assert kept is not None
    assert bool(kept.isfinite().all())


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.feedback and codec.decay == 1], ids=str)
@pytest.mark.parametrize("shape", [(1000,), (20, 50)], ids=str)
def test_what_was_sent_and_what_is_left_are_all_there_was(codec: TensorCodec, shape: tuple[int, ...]) -> None:
    memory, total, sent = memory_of(codec), torch.zeros(shape), torch.zeros(shape)
    kept = memory.start(total)
    for step in range(100):
        gradient = random(*shape, seed=step)
        payload, kept = memory.encode(codec, gradient, kept, seed=step)
        total, sent = total.double() + gradient, sent.double() + codec.decode(payload, gradient, seed=step)
    assert kept is not None
    assert float((sent + kept - total).abs().max()) <= 1e-6 * float(total.abs().max())


def test_momentum_decays() -> None:
    codec, gradient = DCT(edge=8, keep=2, decay=0.5), random(64)
    memory = memory_of(codec)
    payload, first = memory.encode(codec, gradient, memory.start(gradient), seed=0)
    torch.testing.assert_close(first, gradient - codec.decode(payload, gradient, seed=0))
    assert first is not None
    payload, second = memory.encode(codec, gradient, first, seed=0)
    torch.testing.assert_close(second, gradient + 0.5 * first - codec.decode(payload, gradient, seed=0))


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
def test_top_k_leaves_out_at_most_its_share_of_the_squares(ratio: float) -> None:
    codec, tensor = TopK(ratio=ratio), random(1000)
    left = tensor - codec.decode(codec.encode(tensor, seed=0), tensor, seed=0)
    assert float(left.square().sum()) <= (1 - ratio) * float(tensor.square().sum())


def test_cosines_keep_the_squares() -> None:
    """The transform is orthonormal: with every coefficient, nothing is lost, and fewer lose what theirs are."""
    tensor = random(3, 64)
    whole, few = DCT(edge=8, keep=64), DCT(edge=8, keep=10)
    torch.testing.assert_close(whole.decode(whole.encode(tensor, seed=0), tensor, seed=0), tensor)
    sent = few.encode(tensor, seed=0)
    left = tensor - few.decode(sent, tensor, seed=0)
    assert float(left.square().sum() + sent[0].square().sum()) == pytest.approx(float(tensor.square().sum()), rel=1e-5)


def test_one_bit_is_the_mean_magnitude_of_its_block() -> None:
    codec, tensor = OneBit(size=8), torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, 0.0, 0.0, 2.0, -5.0, 1.0])
    expected = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0]) * 1.5
    decoded = codec.decode(codec.encode(tensor, seed=0), tensor, seed=0)
    assert torch.equal(decoded, torch.cat([expected, torch.tensor([-3.0, 3.0])]))


def test_a_row_has_its_own_scale() -> None:
    tensor = torch.tensor([[1.0, 0.5, -1.0], [1000.0, 500.0, 3.0]])
    decoded = Int8(scales="rows").decode(Int8(scales="rows").encode(tensor, seed=0), tensor, seed=0)
    torch.testing.assert_close(decoded, tensor, rtol=0.01, atol=4.0)
    torch.testing.assert_close(decoded[0], tensor[0], rtol=0.01, atol=0.0)


def test_a_tie_of_signs_is_drawn() -> None:
    zeros = torch.zeros(1000)
    draws = [Sign().decode(Sign().encode(zeros, seed=seed), zeros, seed=seed) for seed in range(2)]
    assert not torch.equal(*draws)
    assert all(abs(float(draw.mean())) < 0.2 for draw in draws)


def test_an_estimate_comes_to_what_it_is_of() -> None:
    codec, memory, tensor = TopK(ratio=0.1), SharedEstimate(), random(500)
    mine = theirs = memory.start(tensor)
    for step in range(30):
        payload, mine = memory.encode(codec, tensor, mine, seed=step)
        assert theirs is not None
        theirs = memory.heard(codec, payload, theirs, seed=step)
        assert mine is not None
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(mine, tensor)


# --- drawn numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.unbiased], ids=str)
def test_the_mean_of_many_draws_is_the_tensor(codec: TensorCodec) -> None:
    tensor = random(1000)
    draws = torch.stack([codec.decode(codec.encode(tensor, seed=seed), tensor, seed=seed) for seed in SEEDS])
    errors = (draws.double().mean(dim=0) - tensor).abs()
    assert bool((errors <= 4 * (variance(codec, tensor) / len(draws)).sqrt() + 1e-6).all())


def variance(codec: TensorCodec, tensor: Tensor) -> Tensor:
    """Of one draw, for each element: exact, since those of rare draws would be estimated badly."""
    if isinstance(codec, RandomK):
        return tensor.square() * (1 / codec.ratio - 1)
    assert isinstance(codec, QSGD | TernGrad)
    steps = codec.encode(tensor, seed=0)[0].repeat_interleave(codec.size)[: tensor.numel()]
    part = (tensor / steps).remainder(1)
    return steps.square() * part * (1 - part)


@each_codec
def test_the_same_seed_draws_the_same(codec: TensorCodec) -> None:
    state, tensor = torch.get_rng_state(), random(400)
    first, same, other = (as_bytes(codec.encode(tensor, seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(first, same)
    assert torch.equal(first, other) != (codec.unbiased)
    assert torch.equal(state, torch.get_rng_state())


def test_unbiased_codecs_keep_nothing() -> None:
    """Feedback of what decodes to more than there was would grow without bound."""
    assert not any(codec.feedback for codec in CODECS if codec.unbiased)


# --- PowerSGD --------------------------------------------------------------------------------------------------------


def averaged(codec: PowerSGD, rounds: list[list[list[Tensor]]]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Each round's averages, and each worker's memory in the end; `rounds[r][w]` are worker w's tensors."""
    shapes = [tuple(tensor.shape) for tensor in rounds[0][0]]
    size = len(rounds[0])
    kept = [codec.begin(shapes, torch.zeros(1), seed=0) for _ in range(size)]
    memories = [[torch.zeros(shape) for shape in shapes] for _ in range(size)]
    results = []
    for workers in rounds:
        wholes = [[t + m for t, m in zip(*pair, strict=True)] for pair in zip(workers, memories, strict=True)]
        outs = [[torch.empty_like(tensor) for tensor in whole] for whole in wholes]
        programs = [
            functools.partial(codec.average, whole, q, out=out)
            for whole, q, out in zip(wholes, kept, outs, strict=True)
        ]
        kept = together(programs)
        results.append(outs[0])
        memories = [[owed(left) for left in whole] for whole in wholes]
    return results, memories


def together(programs: list[Callable[..., Any]]) -> list[Any]:
    """Run programs that average tensors with each other, a thread each."""
    barrier, given, found = threading.Barrier(len(programs)), [None] * len(programs), [None] * len(programs)

    def run(rank: int) -> None:
        def mean(tensor: Tensor) -> None:
            given[rank] = tensor.clone()  # type: ignore[call-overload]
            barrier.wait()
            tensor.copy_(torch.stack(given).mean(0))  # type: ignore[arg-type]
            barrier.wait()

        found[rank] = programs[rank](mean=mean)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_matrix_of_low_rank_comes_whole() -> None:
    """Rank 4 for two workers' constant gradients of rank 2."""
    workers = [[random(64, 2, seed=w) @ random(2, 48, seed=10 + w)] for w in range(2)]
    results, _ = averaged(PowerSGD(rank=4, start=0), [workers] * 10)
    mean = (workers[0][0] + workers[1][0]) / 2
    assert float((results[-1][0] - mean).norm() / mean.norm()) < 1e-5


def test_what_powersgd_sent_and_what_is_left_are_the_workers_mean() -> None:
    rounds = [[[random(30, 20, seed=7 * r + w), random(5, seed=r)] for w in range(2)] for r in range(100)]
    results, memories = averaged(PowerSGD(rank=2, start=0), rounds)
    for index in range(2):
        total = torch.stack([w[index].double() for r in rounds for w in r]).sum(0) / 2
        sent = torch.stack([result[index].double() for result in results]).sum(0)
        left = torch.stack([memory[index] for memory in memories]).mean(0)
        assert float((sent + left - total).abs().max()) <= 1e-6 * float(total.abs().max())


def test_bytes_of_matrices() -> None:
    codec = PowerSGD(rank=2)
    assert codec.num_bytes((64, 4, 12)) == 4 * 2 * (64 + 48)
    assert codec.num_bytes((64,)) == 4 * 64
    assert codec.num_bytes((4, 4)) == 4 * 16


# Groups of gloo, held until the process ends: one of gloo's own threads, which call the hook's callbacks, may let go of
# its group long after the test. If it is the last to do so, it joins itself, and the process aborts.
_KEPT: list[Any] = []


def test_powersgd_is_torch_s(tmp_path: Any) -> None:
    """Full-rank gradients, rank 2, coded from the third step on, the same first Q."""
    shape, codec = (24, 18), PowerSGD(rank=2, start=0)
    gradients = [random(*shape, seed=step) for step in range(8)]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    _KEPT.append(dist.distributed_c10d._get_default_group())
    try:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        parameter = torch.nn.Parameter(torch.zeros(shape))
        theirs = []
        for step, gradient in enumerate(gradients):
            bucket = _Bucket(gradient.clone(), parameter, is_last=True)
            theirs.append(powerSGD_hook.powerSGD_hook(state, bucket).wait().view(shape).clone())  # type: ignore[arg-type]
            if step == 2:
                first_q = _first_q(state, shape[1])
    finally:
        dist.destroy_process_group()
    kept, memory = first_q, torch.zeros(shape)
    for step, gradient in enumerate(gradients):
        if step < 2:
            mine = gradient
        else:
            mine, left = torch.empty(shape), gradient + memory
            kept = codec.average([left], kept, out=[mine], mean=lambda tensor: None)
            memory = owed(left)
        assert float((mine - theirs[step]).abs().max()) <= 1e-4 * float(gradient.abs().max())


class _Bucket:
    """What torch's hook asks of a gradient bucket."""

    def __init__(self, gradient: Tensor, parameter: torch.nn.Parameter, *, is_last: bool) -> None:
        self._gradient, self._parameter, self._is_last = gradient.view(-1), parameter, is_last

    def buffer(self) -> Tensor:
        return self._gradient

    def gradients(self) -> list[Tensor]:
        return [self._gradient.view(self._parameter.shape)]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self._parameter]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return self._is_last


def _first_q(state: Any, columns: int) -> Tensor:
    """What torch's hook drew for its first coded step."""
    seed = np.random.RandomState(0).randint(1_000_000_000)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.randn(columns, state.matrix_approximation_rank).view(-1)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(ratio=0),
        lambda: RandomK(ratio=1.5),
        lambda: QSGD(bits=3),
        lambda: QSGD(size=0),
        lambda: TernGrad(size=0),
        lambda: OneBit(size=12),
        lambda: Int8(size=0),
        lambda: DCT(edge=200),
        lambda: DCT(keep=0),
        lambda: DCT(decay=0),
        lambda: PowerSGD(rank=0),
        lambda: PowerSGD(start=-1),
    ],
)
def test_options_out_of_range(make: Callable[[], Codec]) -> None:
    with pytest.raises(UsageError):
        make()


def test_feedback_may_be_left_out_where_rounding_is_all() -> None:
    assert memory_of(BF16(feedback=False)).start(torch.zeros(1)) is None
    assert memory_of(BF16()) == ErrorFeedback()
