"""The data sets by name: their files, where to download them, their layout and their statistics."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from paceline.data.dataset import Dataset, DatasetError, Split
from paceline.data.files import Download, FileSet, locate
from paceline.data.formats import read_cifar10, read_idx
from paceline.errors import UsageError, unknown

Read = Callable[[list[Path]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Entry:
    files: FileSet
    num_test_files: int
    """The last so many of the files are the test split's, the others the training split's."""
    read: Read
    """Reads one split's files as images, uint8 [N, C, H, W], and labels, int64 [N]."""
    num_classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    """Each channel's mean over the training split, in the images' units (0 to 255; digits 0 to 16)."""
    std: tuple[float, ...]
    embedded: bool = False
    """Whether the files come with the package."""


def load(name: str, *, directory: str | os.PathLike[str] | None = None) -> Dataset:
    """A data set by name: `digits` (comes with the package), `mnist`, `fashion-mnist` or `cifar10` (binary version).

    The files are looked for in `directory`, or else in the folder that the environment variable PACELINE_DATA names:
    there or in the subfolder `mnist`, `fashion-mnist` or `cifar-10-batches-bin`, raw or gzip'd. Without `directory`,
    what is not found is downloaded once into the user's cache. Who loads a data set twice in a process gets the same
    tensors twice: they are not to be changed in place.

    Raises:
        UsageError: there is no such data set, or `directory` was given for an embedded one.
        DatasetError: the files are missing and cannot be downloaded, or are damaged; names the file or the folder.
    """
    if name not in ENTRIES:
        raise unknown("data set", name, ENTRIES)
    entry = ENTRIES[name]
    if not entry.embedded:
        paths = locate(entry.files, directory, reserved={other.files.folder for other in ENTRIES.values()})
    elif directory is None:
        paths = locate(entry.files, Path(__file__).parent)
    else:
        raise UsageError(f"{name} comes with Paceline, so a directory has no effect on it: leave it out")
    train, test = paths[: -entry.num_test_files], paths[-entry.num_test_files :]
    return Dataset(name, _split(entry, train), _split(entry, test), entry.num_classes, entry.shape)


_in_use: WeakValueDictionary[Any, Split] = WeakValueDictionary()
"""Splits by their files: the virtual engine's workers, which share a process, so share one copy of the images."""


def _split(entry: Entry, paths: list[Path]) -> Split:
    key = tuple((path, path.stat().st_mtime_ns) for path in paths)
    known = _in_use.get(key)
    if known is not None:
        return known
    images, labels = entry.read(paths)
    where = " and ".join(map(str, paths))
    if len(images) != len(labels):
        raise DatasetError(f"{where} do not belong together: {len(images)} images, {len(labels)} labels")
    if images.shape[1:] != entry.shape:
        raise DatasetError(f"{where}: images of shape {tuple(images.shape[1:])}; expected {entry.shape}")
    if len(labels) and int(labels.max()) >= entry.num_classes:
        raise DatasetError(f"{where}: a label of {int(labels.max())}; expected 0 to {entry.num_classes - 1}")
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (entry.mean, entry.std))
    split = _in_use[key] = Split(images, labels, mean, std)
    return split


def _read_idx_pair(paths: list[Path]) -> tuple[Tensor, Tensor]:
    images, labels = paths
    return read_idx(images, num_dimensions=3).unsqueeze(1), read_idx(labels, num_dimensions=1).long()


MNIST_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _idx(files: FileSet, side: int, *, mean: float, std: float, embedded: bool = False) -> Entry:
    """Ten classes of grey images in idx files, as MNIST has them."""
    return Entry(files, 2, _read_idx_pair, 10, (1, side, side), (mean,), (std,), embedded)


def _like_mnist(folder: str, base: str, *md5s: str) -> FileSet:
    downloads = [Download(f"{base}/{name}.gz", md5) for name, md5 in zip(MNIST_NAMES, md5s, strict=True)]
    return FileSet(folder, MNIST_NAMES, tuple(downloads))


ENTRIES: Mapping[str, Entry] = {
    # Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
    "digits": _idx(
        FileSet("digits", tuple(name.replace("t10k", "test") for name in MNIST_NAMES)),
        8,
        mean=4.8809,
        std=6.0142,
        embedded=True,
    ),
    # LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998.
    "mnist": _idx(
        _like_mnist(
            "mnist",
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        28,
        mean=33.3184,
        std=78.5675,
    ),
    # Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning", 2017.
    "fashion-mnist": _idx(
        _like_mnist(
            "fashion-mnist",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        28,
        mean=72.9404,
        std=90.0212,
    ),
    # Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    "cifar10": Entry(
        files=FileSet(
            "cifar-10-batches-bin",
            (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
            (Download("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
        ),
        num_test_files=1,
        read=read_cifar10,
        num_classes=10,
        shape=(3, 32, 32),
        mean=(125.3069, 122.9504, 113.8654),
        std=(62.9932, 62.0887, 66.7049),
    ),
}
NAMES = tuple(ENTRIES)
