"""What attacks find out from gradients, and what deceives a trained model: exact figures, and naive versions."""

from __future__ import annotations

import contextlib
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.attacks.evading import Box, Fgsm, Pgd, accuracy
from paceline.attacks.leaking import Analytic, Dlg, Idlg, Inverting, Known, Leak, label_of, psnr
from paceline.cli import main
from paceline.data import Dataset, load
from paceline.errors import UsageError
from paceline.lab.pictures import gallery
from paceline.models import build
from paceline.secure import Quantiser
from paceline.secure.secrets import mask
from paceline.training import snapshot


def known_of(data: Dataset, name: str, *, steps: int = 1, seed: int = 0) -> Known:
    torch.manual_seed(seed)
    split = data.train
    low, high = (0 - split.mean) / split.std, (float(split.images.max()) - split.mean) / split.std
    model = build(name, num_classes=data.num_classes, shape=data.shape)
    return Known(model, data.shape, data.num_classes, low, high, steps, 0.1)


def pixels(data: Dataset, inputs: Tensor) -> Tensor:
    return ((inputs * data.train.std + data.train.mean) / float(data.train.images.max())).clamp(0, 1)


def sent_by(known: Known, data: Dataset, number: int) -> tuple[Tensor, int, list[Tensor]]:
    inputs, labels = data.train[number : number + 1]
    return inputs, int(labels), [each.detach() for each in known.sent_for(inputs, labels)]


def found(leak: Leak, known: Known, sent: list[Tensor], seed: int = 1) -> Any:
    return leak.recovered(sent, known, generator=torch.Generator().manual_seed(seed))


def test_what_is_sent_is_the_gradient_or_what_steps_take_off() -> None:
    data = load("digits")
    known = known_of(data, "lenet")
    inputs, labels = data.train[:3]
    loss = F.cross_entropy(known.model(inputs), labels)
    expected = torch.autograd.grad(loss, list(known.model.parameters()))
    torch.testing.assert_close([each.detach() for each in known.sent_for(inputs, labels)], list(expected))
    before = [parameter.detach().clone() for parameter in known.model.parameters()]
    changes = known._replace(steps=5).sent_for(inputs, labels)
    optimizer = torch.optim.SGD(known.model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(known.model(inputs), labels).backward()
        optimizer.step()
    for change, start, parameter in zip(changes, before, known.model.parameters(), strict=True):
        torch.testing.assert_close(change.detach(), (start - parameter.detach()) / 0.1, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_linear_layer_tells_its_input(steps: int) -> None:
    data = load("digits")
    for number in range(20):
        known = known_of(data, "mlp", steps=steps, seed=number)
        inputs, label, sent = sent_by(known, data, number)
        recovered = found(Analytic(), known, sent)
        assert float((recovered.inputs - inputs).abs().max()) < (1e-6 if steps == 1 else 1e-4)
        assert recovered.label == label


def test_the_label_is_always_right() -> None:
    data = load("digits")
    for name in ("mlp", "lenet"):
        known = known_of(data, name)
        for number in range(60):
            _, label, sent = sent_by(known, data, number)
            assert label_of(sent) == label


@pytest.mark.parametrize(("leak", "steps"), [(Dlg(120), 1), (Idlg(120, 1), 1), (Idlg(120, 1), 5)])
def test_gradients_of_lenet_become_images(leak: Leak, steps: int) -> None:
    data = load("digits")
    known = known_of(data, "lenet", steps=steps)
    inputs, label, sent = sent_by(known, data, 3)
    recovered = found(leak, known, sent)
    assert psnr(pixels(data, recovered.inputs), pixels(data, inputs)) >= 20
    assert recovered.label == label


@pytest.mark.slow
@pytest.mark.parametrize(("leak", "steps"), [(Dlg(160), 1), (Idlg(160), 5)])
def test_gradients_of_lenet_become_handwriting(leak: Leak, steps: int, data_directory: Path) -> None:
    data = load("mnist", directory=data_directory)
    known = known_of(data, "lenet", steps=steps)
    for number in (3, 4):
        inputs, label, sent = sent_by(known, data, number)
        recovered = found(leak, known, sent)
        assert psnr(pixels(data, recovered.inputs), pixels(data, inputs)) >= 20
        assert recovered.label == label


def test_a_direction_tells_the_image_roughly() -> None:
    """Inverting Gradients, which scales do not deceive."""
    data = load("digits")
    known = known_of(data, "lenet")
    inputs, label, sent = sent_by(known, data, 3)
    start = found(Inverting(iterations=0), known, sent)
    recovered = found(Inverting(iterations=250), known, [3 * each for each in sent])
    qualities = [psnr(pixels(data, each.inputs), pixels(data, inputs)) for each in (start, recovered)]
    assert qualities[1] > qualities[0] + 5
    assert recovered.label == label
    assert bool((recovered.inputs <= known.high).all())


def test_noise_and_masks_keep_images() -> None:
    """Below 10 dB under noise of 1, and where what the server sees is masked."""
    data = load("digits")
    known = known_of(data, "lenet")
    inputs, _, sent = sent_by(known, data, 3)
    generator = torch.Generator().manual_seed(5)
    noisy = [each + torch.randn(each.shape, generator=generator) for each in sent]
    quantiser, flat = Quantiser(1.0, 10), torch.cat([each.reshape(-1) for each in sent])
    words = quantiser.encode(flat) + mask(bytes(range(32)), len(flat))
    decoded = quantiser.decode(words, num_summed=1).float().split([each.numel() for each in sent])
    masked = [part.view(each.shape) for part, each in zip(decoded, sent, strict=True)]
    for heard in (noisy, masked):
        recovered = found(Idlg(iterations=60, restarts=1), known, heard)
        assert psnr(pixels(data, recovered.inputs.nan_to_num()), pixels(data, inputs)) < 10


def test_a_model_that_does_not_fit_is_refused() -> None:
    data = load("digits")
    known = known_of(data, "lenet")
    with pytest.raises(UsageError, match="analytic needs a model whose first layer is linear"):
        found(Analytic(), known, sent_by(known, data, 0)[2])


# --- evasion ----------------------------------------------------------------------------------------------------------


def box(eps: float, *, low: float = 0.0, high: float = 1.0) -> Box:
    return Box(torch.full((1, 1, 1), low), torch.full((1, 1, 1), high), torch.full((1, 1, 1), eps))


def test_on_a_linear_model_the_worst_is_known() -> None:
    """Of two classes the loss rises with the sign of the weights' difference, and the furthest corner is the worst."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
    inputs, labels = torch.rand(40, 1, 3, 3), torch.randint(2, (40,))
    weights = model[1].weight.detach()
    sign = torch.stack([weights[1 - int(label)] - weights[int(label)] for label in labels]).sign().view(inputs.shape)
    worst = (inputs + 0.1 * sign).clamp(0, 1)
    generator = torch.Generator().manual_seed(0)
    for evasion in (Fgsm(eps=0.1), Pgd(eps=0.1, steps=80)):
        shown = evasion.evading(model, inputs, labels, box(0.1), generator=generator)
        torch.testing.assert_close(shown, worst, rtol=0, atol=1e-6)
    assert accuracy(model, worst, labels) < accuracy(model, inputs, labels)


def test_nothing_leaves_the_box_and_many_steps_deceive_more_than_one() -> None:
    data = load("digits")
    torch.manual_seed(0)
    model = build("fedavg-cnn", num_classes=10, shape=data.shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        for x, y in zip(*(each.split(50) for each in data.train[:]), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    known, (inputs, labels) = known_of(data, "mlp"), data.test[:100]
    limits = Box(known.low, known.high, 0.1 * (known.high - known.low))
    scores = [accuracy(model, inputs, labels)]
    for evasion in (Fgsm(), Pgd(step=0.1)):
        shown = evasion.evading(model, inputs, labels, limits, generator=torch.Generator().manual_seed(0))
        assert bool(((shown - inputs).abs() <= limits.reach + 1e-6).all())
        assert bool(((shown >= limits.low) & (shown <= limits.high)).all())
        scores.append(accuracy(model, shown, labels))
    assert scores[0] > 0.85
    assert scores[2] < scores[1] < scores[0]


@pytest.mark.slow
def test_forty_steps_leave_a_plain_network_next_to_nothing(data_directory: Path) -> None:
    """Madry et al., ICLR 2018, table 1: on MNIST with eps .3, 5 % at most."""
    data = load("mnist", directory=data_directory)
    torch.manual_seed(0)
    model = build("fedavg-cnn", num_classes=10, shape=data.shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(150):
        x, y = data.train[64 * number : 64 * (number + 1)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    known, (inputs, labels) = known_of(data, "mlp"), data.test[:100]
    limits = Box(known.low, known.high, 0.3 * (known.high - known.low))
    shown = Pgd().evading(model, inputs, labels, limits, generator=torch.Generator().manual_seed(0))
    assert accuracy(model, inputs, labels) > 0.9
    assert accuracy(model, shown, labels) <= 0.05


# --- the command ------------------------------------------------------------------------------------------------------


def paceline(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", *arguments])
    with contextlib.suppress(SystemExit):
        main()


def test_leak_prints_what_it_found_and_draws_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "leaked.png"
    paceline(monkeypatch, "attack", "leak", "--method", "analytic", "--samples", "3", "--out", str(out))
    said = capsys.readouterr().out
    assert "analytic on mlp" in said
    rows = [line.split() for line in said.splitlines() if "120.0" in line]
    assert len(rows) == 3, said
    assert out.read_bytes().startswith(b"\x89PNG")


def test_property_prints_its_auc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    paceline(monkeypatch, "attack", "property", "--method", "class:label=3", "--batches", "20")
    said = capsys.readouterr().out
    assert "class:label=3 on mlp" in said
    assert float(said.replace("│", " ").split()[-2]) > 0.95, said


def test_evade_reads_what_a_run_has_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = build("mlp", num_classes=10, shape=(1, 8, 8))
    (tmp_path / "model.safetensors").write_bytes(snapshot.as_model_file(model.state_dict()))
    paceline(monkeypatch, "attack", "evade", str(tmp_path), "--method", "fgsm:eps=0.2", "--samples", "50")
    assert "fgsm:eps=0.2 on mlp" in capsys.readouterr().out
    paceline(monkeypatch, "attack", "evade", str(tmp_path), "--model", "lenet")
    assert "holds no lenet for digits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["stroke"], "unknown attack 'stroke'"),
        (["evade"], "evade needs a trained model"),
        (["leak", "model"], "leak is of a fresh model"),
        (["property", "model"], "property is of a fresh model"),
        (["property", "--batches", "1"], "batches must be at least 2"),
        (["property", "--out", "x.png"], "--out has no effect on property, which takes --model, --dataset"),
        (["property", "--noise", "0.0"], "--noise has no effect on property"),
        (["leak", "--batches", "100"], "leak, which takes --model, --dataset, --method, --samples, --st"),
        (["evade", "runs", "--steps", "1"], "--steps has no effect on evade"),
        (["leak", "--lr", "0.2"], "--lr has no effect with one step"),
        (["property", "--method", "class:label=11", "--batches", "2"], "5 samples of a kind of which there are 0"),
        (["leak", "--samples", "0"], "samples and steps must be at least 1"),
        (["leak", "--method", "guess"], "unknown leak 'guess'"),
        (["evade", "nowhere"], "nowhere holds no mlp for digits"),
    ],
)
def test_what_the_command_cannot_do_is_said(
    arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paceline(monkeypatch, "attack", *arguments)
    assert why in " ".join(capsys.readouterr().err.split())


def test_a_picture_holds_its_pixels() -> None:
    first, second = torch.rand(3, 1, 2, 5), torch.rand(2, 1, 2, 5)
    raw = gallery([first, second])
    width, height = struct.unpack(">II", raw[16:24])
    assert (width, height) == (3 * (4 * 5 + 4), 2 * (4 * 2 + 4))
    at = raw.index(b"IDAT")
    (length,) = struct.unpack(">I", raw[at - 4 : at])
    pixels = torch.frombuffer(bytearray(zlib.decompress(raw[at + 4 : at + 4 + length])), dtype=torch.uint8)
    rows = pixels.view(height, 1 + 3 * width)[:, 1:].view(height, width, 3)
    assert int(rows[4, 24 + 8, 0]) == int((first[1, 0, 1, 2] * 255).round())
    assert int(rows[12, 4, 2]) == int((second[0, 0, 0, 1] * 255).round())
    assert int(rows[12, 60, 1]) == 255
