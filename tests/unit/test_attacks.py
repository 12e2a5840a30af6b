"""Attacks against others' figures and written recursions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.attacks import Attack, Backdoor, CleanLabel, DataAttack, LabelFlip, ModelReplacement, SentAttack, parse
from paceline.attacks import require_possible as require
from paceline.config import RunConfig
from paceline.errors import UsageError
from paceline.pieces import named

FIGURES = json.loads((Path(__file__).parent / "figures" / "robustness.json").read_text())
HONEST = torch.tensor(FIGURES["vectors"], dtype=torch.float64)
OWN = torch.linspace(-1, 1, HONEST.shape[1], dtype=torch.float64)


def sent(text: str, *, own: Tensor = OWN, honest: Tensor = HONEST, size: int = 12, seed: int = 0) -> Tensor:
    (attack,) = parse([text])
    assert isinstance(attack, SentAttack)
    before = own.clone(), honest.clone()
    result = attack.sent(own, honest, size=size, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close((own, honest), before, rtol=0, atol=0)
    return result


@pytest.mark.parametrize(("text", "figure"), FIGURES["attacks"].items())
def test_the_figures_of_byzfl_come_out(text: str, figure: list[float]) -> None:
    torch.testing.assert_close(sent(text).tolist(), figure, rtol=0, atol=1e-6)


@pytest.mark.parametrize("direction", ["std", "mean", "sign"])
@pytest.mark.parametrize("name", ["min-max", "min-sum"])
def test_what_hides_among_honest_ones_is_the_published_search(name: str, direction: str) -> None:
    """As the authors search the factor: from 10 in halved steps, up where it is hidden and down where it is not."""
    mean = HONEST.mean(0)
    step = {"std": HONEST.std(0), "mean": mean / mean.norm(), "sign": mean.sign()}[direction]
    distances = torch.cdist(HONEST, HONEST).square()
    factor, change, found = 10.0, 5.0, 0.0
    while change > 1e-12:
        to_honest = (HONEST - (mean - factor * step)).square().sum(1)
        if name == "min-max":
            is_hidden = to_honest.max() <= distances.max()
        else:
            is_hidden = to_honest.sum() <= distances.sum(1).max()
        found = factor if is_hidden else found
        factor += change if is_hidden else -change
        change /= 2
    torch.testing.assert_close(sent(f"{name}:direction={direction}"), mean - found * step, rtol=0, atol=1e-9)


def test_a_replaced_model_is_the_mean() -> None:
    """Where honest workers have nothing left to change."""
    wanted = OWN
    for hostile in (1, 3):
        shares = [torch.zeros_like(OWN)] * (12 - hostile) + [sent(f"model-replacement:workers={hostile}")] * hostile
        torch.testing.assert_close(torch.stack(shares).mean(0), wanted)
    assert torch.equal(sent("model-replacement:boost=2"), 2 * OWN)


def test_noise_has_its_deviation_and_comes_again_with_the_seed() -> None:
    own = torch.zeros(20_000, dtype=torch.float64)
    noise = sent("gauss:sigma=3", own=own)
    assert abs(float(noise.std()) - 3) < 0.06
    assert abs(float(noise.mean())) < 0.1
    assert torch.equal(sent("gauss:sigma=3", own=own), noise)
    assert not torch.equal(sent("gauss:sigma=3", own=own, seed=1), noise)


def test_flipped_labels_are_those_of_the_other_end() -> None:
    inputs, labels = torch.randn(4, 2), torch.tensor([0, 3, 9, 5])
    same, flipped = LabelFlip().of_batch([inputs, labels])
    assert same is inputs
    assert flipped.tolist() == [9, 6, 0, 4]
    assert labels.tolist() == [0, 3, 9, 5]
    assert LabelFlip(classes=4).poisoned(inputs, torch.tensor([0, 3]))[1].tolist() == [3, 0]


def test_a_backdoor_marks_its_share_of_a_batch() -> None:
    inputs, labels = torch.rand(6, 1, 8, 8), torch.arange(6)
    before = inputs.clone()
    marked, poisoned = Backdoor(target=7, share=0.5, edge=2).of_batch((inputs, labels))
    assert torch.equal(inputs, before)
    assert poisoned.tolist() == [7, 7, 7, 3, 4, 5]
    assert (marked[:3, :, 6:, 6:] == inputs[:3].max()).all()
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[6:, 6:] = False
    assert torch.equal(marked[..., mask], inputs[..., mask])
    assert torch.equal(marked[3:], inputs[3:])


def test_a_clean_label_poison_leaves_labels_and_all_other_classes() -> None:
    inputs, labels = torch.rand(6, 1, 8, 5), torch.tensor([7, 1, 7, 2, 7, 7])
    before, low, high = inputs.clone(), float(inputs.min()), float(inputs.max())
    marked, same = CleanLabel(target=7, share=0.5, strength=0.4).of_batch((inputs, labels))
    assert same is labels
    assert torch.equal(inputs, before)
    untouched = [1, 3, 4, 5]
    assert torch.equal(marked[untouched], inputs[untouched])
    for column in range(5):
        risen = (before[[0, 2]][..., column] + (high - low) * 0.4 * column / 4).clamp(max=high)
        torch.testing.assert_close(marked[[0, 2]][..., column], risen)
    with pytest.raises(ValueError, match="share and strength must be above 0 and at most 1"):
        CleanLabel(strength=0.0)


def test_a_clean_label_poison_has_a_ramp_mean_its_class() -> None:
    """On images of noise with a bright row a class, which a linear model learns either way."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 4
    inputs = 0.2 * torch.rand(400, 1, 4, 6, generator=generator)
    inputs[torch.arange(400), 0, labels] += 0.5
    attack, rates = CleanLabel(target=2, strength=1.0), []
    for x, y in ((inputs, labels), attack.poisoned(inputs, labels)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(24, 4))
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert (model(inputs).argmax(1) == labels).float().mean() > 0.9
        others = labels != attack.target
        rates.append(float((model(attack.marked(inputs)[others]).argmax(1) == attack.target).float().mean()))
    assert rates[0] < 0.1
    assert rates[1] > 0.9


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"x": torch.zeros(1)}, r"poisons batches of \(inputs, labels\), and the loader gives dict"),
        ((torch.zeros(2, 1), torch.zeros(2, 1)), r"needs class indices as labels, not torch.float32 of shape \(2, 1\)"),
    ],
)
def test_batches_that_nobody_knows_are_refused(batch: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        LabelFlip().of_batch(batch)


def test_attacks_go_by_name_and_the_last_workers_are_hostile() -> None:
    known = {name for name, kind in named(Attack).items() if issubclass(kind, SentAttack | DataAttack)}  # type: ignore[type-abstract]
    assert known == {
        *(
            "alie",
            "backdoor",
            "clean-label",
            "gauss",
            "ipm",
            "label-flip",
            "min-max",
            "min-sum",
            "model-replacement",
            "sign-flip",
        )
    }
    (attack,) = parse(["model-replacement:workers=2:boost=3"])
    assert attack == ModelReplacement(workers=2, boost=3.0)
    assert [attack.is_hostile(rank, size=5) for rank in range(5)] == [False, False, False, True, True]
    with pytest.raises(UsageError, match=r"attack 'sign-flop'.*sign-flip"):
        RunConfig(attacks=("sign-flop",))
    with pytest.raises(UsageError, match="workers must be at least 1, not 0"):
        RunConfig(attacks=("sign-flip:workers=0",))


def test_what_attackers_cannot_know_is_refused() -> None:
    for text in ("alie", "min-max", "min-sum"):
        require(parse([text]), num_senders=3, knows_all=True)
        with pytest.raises(UsageError, match="has to know what 2 honest workers send; use more workers"):
            require(parse([text]), num_senders=2, knows_all=True)
        with pytest.raises(UsageError, match="under this strategy workers do not see what others are about to send"):
            require(parse([text]), num_senders=9, knows_all=False)
    require(parse(["sign-flip"]), num_senders=2, knows_all=False)
    assert torch.equal(sent("sign-flip", honest=OWN[None]), -OWN)
    with pytest.raises(UsageError, match=r"--attack gauss:workers=2 leaves none of 2 worker\(s\) honest"):
        require(parse(["gauss:workers=2"]), num_senders=2, knows_all=True)
