"""Data sets as they are trained on: the embedded digits, batches, normalisation, augmentation, the real sets."""

from __future__ import annotations

import hashlib
import importlib.resources
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from paceline.data import NAMES, Split, augment_cifar10, collate, load
from paceline.data.catalogue import ENTRIES
from paceline.errors import UsageError


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# The embedded digits


def test_digits_come_with_the_package() -> None:
    folder = importlib.resources.files("paceline.data") / "digits"
    names = {path.name for path in folder.iterdir()}
    assert names == {f"{name}.gz" for name in ENTRIES["digits"].files.names} | {"README.md"}
    assert "CC BY 4.0" in (folder / "README.md").read_text()


def test_digits_split_is_fixed() -> None:
    digits = load("digits")
    assert (len(digits.train), len(digits.test)) == (1500, 297)
    assert (digits.shape, digits.num_classes) == ((1, 8, 8), 10)
    assert digits.train.images.max() == 16
    assert digits.train.labels.bincount().min() >= 140
    assert digits.test.labels.bincount().min() >= 25
    content = b"".join(
        tensor.numpy().tobytes() for split in (digits.train, digits.test) for tensor in (split.images, split.labels)
    )
    assert hashlib.sha256(content).hexdigest() == "4d78484764c97c1bda416cbbf1e64f21efa2a473e1e20d330940c0496d0400e7"


def test_digits_ignore_the_variable_and_refuse_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    assert len(load("digits").train) == 1500
    with pytest.raises(UsageError, match="digits comes with Paceline"):
        load("digits", directory=tmp_path)


# Batches


def test_loader_takes_every_image_once() -> None:
    train = load("digits").train
    loader = DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate)
    batches = list(loader)
    assert [len(labels) for _, labels in batches] == [32] * 46 + [28]
    seen = torch.cat([images for images, _ in batches])
    wanted, _ = train[:]
    assert seen.dtype == torch.float32
    assert torch.equal(seen.sum((1, 2, 3)).sort().values, wanted.sum((1, 2, 3)).sort().values)


@given(indices=st.lists(st.integers(0, 296), min_size=1, max_size=8))
def test_batch_equals_its_images(indices: list[int]) -> None:
    test = load("digits").test
    singles = [test[index] for index in indices]
    images = torch.stack([image for image, _ in singles])
    labels = torch.stack([label for _, label in singles])
    for batch in (
        test.__getitems__(indices),
        test[torch.tensor(indices)],
        Subset(test, indices)[list(range(len(indices)))],
    ):
        assert torch.equal(batch[0], images)
        assert torch.equal(batch[1], labels)


def test_normalisation_is_per_channel() -> None:
    split = Split(
        images=random_bytes(5, 3, 2, 2),
        labels=torch.arange(5),
        mean=torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1),
        std=torch.tensor([4.0, 5.0, 6.0]).view(3, 1, 1),
    )
    images, _ = split[1:3]
    for channel, (mean, std) in enumerate([(1, 4), (2, 5), (3, 6)]):
        torch.testing.assert_close(images[:, channel], (split.images[1:3, channel].float() - mean) / std)
    assert torch.equal(split.images, random_bytes(5, 3, 2, 2))


@given(num_images=st.integers(0, 5), seed=st.integers(0, 99))
def test_augmented_images_are_mirrored_crops(num_images: int, seed: int) -> None:
    images = torch.rand(num_images, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) + 1
    augmented = augment_cifar10(images, generator=torch.Generator().manual_seed(seed))
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    for padded_image, result in zip(padded, augmented, strict=True):
        crops = [padded_image[:, top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
        assert any(torch.equal(result, crop) or torch.equal(result, crop.flip(2)) for crop in crops)
    assert torch.equal(augmented, augment_cifar10(images, generator=torch.Generator().manual_seed(seed)))


def test_augmentation_takes_every_place_and_mirrors_half() -> None:
    columns = torch.arange(1.0, 33.0).expand(20_000, 1, 32, 32)
    augmented = augment_cifar10(columns, generator=torch.Generator().manual_seed(0))
    middle = augmented[:, 0, 16, 15:17]
    mirrored = middle[:, 0] > middle[:, 1]
    assert mirrored.float().mean().item() == pytest.approx(0.5, abs=0.02)
    shares = torch.bincount(middle.amin(1).long()) / len(middle)
    assert shares.nonzero().flatten().tolist() == list(range(12, 21))
    assert shares[12:].tolist() == pytest.approx([1 / 9] * 9, abs=0.02)


# The real data sets


@pytest.mark.parametrize(
    ("name", "num_train", "num_test", "class_sizes"),
    [("mnist", 60_000, 10_000, (5_421, 6_742)), ("cifar10", 50_000, 10_000, (5_000, 5_000))],
)
def test_real_data_set(
    data_directory: Path, name: str, num_train: int, num_test: int, class_sizes: tuple[int, int]
) -> None:
    data = load(name, directory=data_directory)
    assert (len(data.train), len(data.test)) == (num_train, num_test)
    counts = data.train.labels.bincount()
    assert (len(counts), int(counts.min()), int(counts.max())) == (10, *class_sizes)
    means, stds = channel_statistics(data.train)
    assert means == pytest.approx([0.0] * len(means), abs=1e-4)
    assert stds == pytest.approx([1.0] * len(stds), abs=1e-4)


def test_digits_are_normalised() -> None:
    means, stds = channel_statistics(load("digits").train)
    assert means == pytest.approx([0.0], abs=1e-4)
    assert stds == pytest.approx([1.0], abs=1e-4)


def channel_statistics(split: Split) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel after normalisation."""
    total = torch.zeros(split.images.shape[1], dtype=torch.float64)
    total_of_squares = torch.zeros_like(total)
    for images, _ in DataLoader(split, batch_size=5000, collate_fn=collate):
        pixels = images.double().transpose(0, 1).flatten(1)
        total += pixels.sum(1)
        total_of_squares += pixels.square().sum(1)
    num_pixels = split.images.numel() / len(total)
    means = total / num_pixels
    return means.tolist(), (total_of_squares / num_pixels - means.square()).sqrt().tolist()


def test_names() -> None:
    assert NAMES == ("digits", "mnist", "fashion-mnist", "cifar10")
