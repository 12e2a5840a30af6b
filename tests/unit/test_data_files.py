"""Files of data sets: official layouts read back, files found or fetched, damage named."""

from __future__ import annotations

import functools
import gc
import gzip
import hashlib
import io
import os
import struct
import tarfile
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.data import DatasetError, load
from paceline.data.catalogue import ENTRIES, MNIST_NAMES
from paceline.data.files import Download
from paceline.data.formats import CIFAR10_ROW_BYTES, read_cifar10, read_idx
from paceline.errors import UsageError

CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_NAMES = ENTRIES["cifar10"].files.names


def random_bytes(*shape: int, seed: int = 0, high: int = 256) -> Tensor:
    return torch.randint(high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def idx_bytes(values: Tensor) -> bytes:
    header = struct.pack(f">BBBB{values.dim()}I", 0, 0, 8, values.dim(), *values.shape)
    return header + values.numpy().tobytes()


def cifar10_bytes(images: Tensor, labels: Tensor) -> bytes:
    rows = torch.cat([labels.to(torch.uint8)[:, None], images.flatten(1)], dim=1)
    return rows.numpy().tobytes()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_mnist(folder: Path, *, suffix: str = "", seed: int = 0) -> None:
    """A tiny data set in MNIST's layout: 7 training and 3 test images."""
    for name in MNIST_NAMES:
        num = 7 if name.startswith("train") else 3
        images = "images" in name
        values = random_bytes(num, 28, 28, seed=seed) if images else random_bytes(num, seed=seed, high=10)
        write(folder / f"{name}{suffix}", idx_bytes(values))


def cifar10_files() -> dict[str, bytes]:
    """A tiny CIFAR-10: 4 images a file."""
    return {
        name: cifar10_bytes(random_bytes(4, 3, 32, 32, seed=index), random_bytes(4, high=10, seed=index))
        for index, name in enumerate(CIFAR10_NAMES)
    }


def write_cifar10(folder: Path) -> None:
    for name, content in cifar10_files().items():
        write(folder / name, content)


@pytest.fixture(autouse=True)
def clean_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data set of this machine is found, and nothing is asked of the network."""
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, entry in ENTRIES.items():
        nowhere = tuple(
            replace(download, url=f"http://127.0.0.1:9/{Path(download.url).name}") for download in entry.files.downloads
        )
        monkeypatch.setitem(ENTRIES, name, replace(entry, files=replace(entry.files, downloads=nowhere)))


# Layouts


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    seed=st.integers(0, 9),
    suffix=st.sampled_from(["", ".gz"]),
)
def test_idx_reads_back(shape: list[int], seed: int, suffix: str) -> None:
    values = random_bytes(*shape, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / f"values{suffix}", idx_bytes(values))
        assert torch.equal(read_idx(path, num_dimensions=len(shape)), values)


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3), suffix=st.sampled_from(["", ".gz"]))
def test_cifar10_binary_reads_back(lengths: list[int], suffix: str) -> None:
    images = random_bytes(sum(lengths), 3, 32, 32)
    labels = random_bytes(sum(lengths), high=10, seed=1).long()
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            write(Path(folder) / f"part_{part}.bin{suffix}", cifar10_bytes(*chunks))
            for part, chunks in enumerate(zip(torch.split(images, lengths), torch.split(labels, lengths), strict=True))
        ]
        read_images, read_labels = read_cifar10(paths)
    assert torch.equal(read_images, images)
    assert torch.equal(read_labels, labels)
    assert read_labels.dtype == torch.int64


@given(num_lost_bytes=st.integers(1, 40), suffix=st.sampled_from(["", ".gz"]))
def test_truncated_idx(num_lost_bytes: int, suffix: str) -> None:
    content = idx_bytes(random_bytes(4, 2, 3))
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / f"images{suffix}", content[:-num_lost_bytes])
        with pytest.raises(DatasetError, match=rf"images.* {len(content) - num_lost_bytes} bytes.*"):
            read_idx(path, num_dimensions=3)


def test_surplus_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "labels", idx_bytes(random_bytes(4)) + b"\0")
    with pytest.raises(DatasetError, match=r"labels holds 13 bytes; expected 12 for its shape \[4\]"):
        read_idx(path, num_dimensions=1)


def test_wrong_magic(tmp_path: Path) -> None:
    path = write(tmp_path / "images", idx_bytes(random_bytes(16)))
    with pytest.raises(DatasetError, match="images starts with the magic number 0x00000801; expected 0x00000803"):
        read_idx(path, num_dimensions=3)


@pytest.mark.parametrize("content", [b"", bytes(CIFAR10_ROW_BYTES - 1), bytes(CIFAR10_ROW_BYTES + 1)])
def test_truncated_cifar10(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "data_batch_1.bin", content)
    with pytest.raises(DatasetError, match=rf"data_batch_1.bin holds {len(content)} bytes; expected .* rows of 3073"):
        read_cifar10([path])


@pytest.mark.parametrize("damage", ["cut", "not gzip", "garbled"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress(idx_bytes(random_bytes(50, 8, 8)))
    damaged = {"cut": whole[:-20], "not gzip": b"<html>", "garbled": whole[:100] + bytes(50) + whole[150:]}[damage]
    path = tmp_path / "images.gz"
    path.write_bytes(damaged)
    with pytest.raises(DatasetError, match=r"images.gz cannot be read: "):
        read_idx(path, num_dimensions=3)


# Where files are looked for


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize("parent", [False, True])
def test_folder_or_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, by_variable: bool, parent: bool
) -> None:
    write_mnist(tmp_path / "mnist", suffix=suffix)
    place = tmp_path if parent else tmp_path / "mnist"
    if by_variable:
        monkeypatch.setenv("PACELINE_DATA", str(place))
    mnist = load("mnist", directory=None if by_variable else place)
    assert (len(mnist.train), len(mnist.test)) == (7, 3)
    assert torch.equal(mnist.train.images, random_bytes(7, 1, 28, 28))
    assert torch.equal(mnist.test.labels, random_bytes(3, high=10).long())


def test_directory_outranks_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "one", seed=1)
    write_mnist(tmp_path / "two", seed=2)
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "one"))
    assert torch.equal(load("mnist", directory=tmp_path / "two").train.images, random_bytes(7, 1, 28, 28, seed=2))


def test_raw_file_outranks_the_compressed_one(tmp_path: Path) -> None:
    write_mnist(tmp_path, seed=1)
    write_mnist(tmp_path, seed=2, suffix=".gz")
    assert torch.equal(load("mnist", directory=tmp_path).train.images, random_bytes(7, 1, 28, 28, seed=1))


def test_mnist_is_not_taken_for_fashion_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    with pytest.raises(DatasetError, match="fashion-mnist"):
        load("fashion-mnist", directory=tmp_path / "mnist")
    with pytest.raises(DatasetError, match="fashion-mnist"):
        load("fashion-mnist", directory=tmp_path)


def test_mapped_files_are_not_written_to(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    before = (tmp_path / MNIST_NAMES[0]).read_bytes()
    load("mnist", directory=tmp_path).train.images.zero_()
    assert (tmp_path / MNIST_NAMES[0]).read_bytes() == before


def test_unknown_name_suggests_the_near_miss() -> None:
    with pytest.raises(UsageError, match="unknown data set 'cifar-10'; did you mean 'cifar10'"):
        load("cifar-10")


def test_images_are_held_once_and_only_while_in_use(tmp_path: Path) -> None:
    """As many workers as there may be in one process; files that have changed are other files."""
    write_cifar10(tmp_path)
    first, second = load("cifar10", directory=tmp_path), load("cifar10", directory=tmp_path)
    assert (second.train, second.test) == (first.train, first.test)
    stat = (tmp_path / CIFAR10_NAMES[0]).stat()
    os.utime(tmp_path / CIFAR10_NAMES[0], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    third = load("cifar10", directory=tmp_path)
    assert third.train is not first.train
    assert third.test is first.test
    images = weakref.ref(first.test)
    del first, second, third
    gc.collect()
    assert images() is None


def test_missing_in_the_given_directory(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=rf"data_batch_1.bin.* {tmp_path} or in its subfolder {CIFAR10_FOLDER}"):
        load("cifar10", directory=tmp_path)


def test_one_file_missing(tmp_path: Path) -> None:
    write_cifar10(tmp_path / CIFAR10_FOLDER)
    (tmp_path / CIFAR10_FOLDER / "data_batch_3.bin").unlink()
    with pytest.raises(DatasetError, match=f"{CIFAR10_FOLDER} lacks data_batch_3.bin, raw or with .gz"):
        load("cifar10", directory=tmp_path)


def test_labels_of_another_file(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(random_bytes(6, high=10)))
    with pytest.raises(DatasetError, match="do not belong together: 7 images, 6 labels"):
        load("mnist", directory=tmp_path)


def test_label_out_of_range(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(torch.full((7,), 10, dtype=torch.uint8)))
    with pytest.raises(DatasetError, match="a label of 10; expected 0 to 9"):
        load("mnist", directory=tmp_path)


def test_images_of_another_shape(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write(tmp_path / "train-images-idx3-ubyte", idx_bytes(random_bytes(7, 28, 27)))
    with pytest.raises(DatasetError, match=r"images of shape \(1, 28, 27\); expected \(1, 28, 28\)"):
        load("mnist", directory=tmp_path)


# Downloads


class Server:
    """A web server on this machine that counts what it hands out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requested: list[str] = []
        server = self

        class Handler(SimpleHTTPRequestHandler):
            def log_request(self, *_: object) -> None:
                server.requested.append(self.path)

            def log_error(self, *_: object) -> None:
                return None

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def publish(self, name: str, content: bytes) -> Download:
        write_path = self.folder / name
        write_path.write_bytes(content)
        return Download(f"{self.url}/{name}", hashlib.md5(content).hexdigest())

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "served").mkdir()
    server = Server(tmp_path / "served")
    yield server
    server.close()


def publish(monkeypatch: pytest.MonkeyPatch, name: str, *downloads: Download) -> None:
    entry = ENTRIES[name]
    monkeypatch.setitem(ENTRIES, name, replace(entry, files=replace(entry.files, downloads=downloads)))


def tar_gz(members: dict[str, bytes], *links: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for link in links:
            tar.addfile(link)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def cifar10_archive() -> bytes:
    return tar_gz({f"{CIFAR10_FOLDER}/{name}": content for name, content in cifar10_files().items()})


def test_archive_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    publish(monkeypatch, "cifar10", server.publish("cifar.tar.gz", cifar10_archive()))
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "elsewhere"))
    with ThreadPoolExecutor(4) as workers:
        loaded = [*workers.map(load, ["cifar10"] * 4), load("cifar10")]
    assert server.requested == ["/cifar.tar.gz"]
    for cifar10 in loaded:
        assert (len(cifar10.train), len(cifar10.test)) == (20, 4)
        assert torch.equal(cifar10.train.images[4:8], random_bytes(4, 3, 32, 32, seed=1))
        assert torch.equal(cifar10.test.labels, random_bytes(4, high=10, seed=5).long())
    cache = tmp_path / "cache" / "paceline" / CIFAR10_FOLDER
    assert {path.name for path in cache.iterdir()} - {".lock"} == set(CIFAR10_NAMES)


def test_separate_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    write_mnist(tmp_path / "made", suffix=".gz")
    downloads = [server.publish(f"{name}.gz", (tmp_path / "made" / f"{name}.gz").read_bytes()) for name in MNIST_NAMES]
    publish(monkeypatch, "mnist", *downloads)
    assert len(load("mnist").train) == 7
    (tmp_path / "cache" / "paceline" / "mnist" / f"{MNIST_NAMES[2]}.gz").unlink()
    assert len(load("mnist").test) == 3
    assert server.requested == [*(f"/{name}.gz" for name in MNIST_NAMES), f"/{MNIST_NAMES[2]}.gz"]


def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache" / "paceline" / CIFAR10_FOLDER
    with pytest.raises(DatasetError) as caught:
        load("cifar10")
    for clue in ("http://127.0.0.1:9/cifar-10-binary.tar.gz", str(cache), "PACELINE_DATA (which is not set)"):
        assert clue in str(caught.value)
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    with pytest.raises(DatasetError, match=f"PACELINE_DATA={tmp_path}"):
        load("cifar10")


def test_wrong_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    download = server.publish("cifar.tar.gz", cifar10_archive())
    publish(monkeypatch, "cifar10", replace(download, md5="0" * 32))
    with pytest.raises(DatasetError, match=r"cifar.tar.gz failed: .*hash"):
        load("cifar10")


def test_absent_on_the_server(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    publish(monkeypatch, "cifar10", Download(f"{server.url}/absent.tar.gz", "0" * 32))
    with pytest.raises(DatasetError, match=r"absent.tar.gz failed: 404"):
        load("cifar10")


def test_archive_that_is_none(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    publish(monkeypatch, "cifar10", server.publish("cifar.tar.gz", b"<html>no such page</html>"))
    with pytest.raises(DatasetError, match=r"cifar.tar.gz failed: "):
        load("cifar10")


def test_archive_without_a_file(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    members = {name: content for name, content in cifar10_files().items() if name != "test_batch.bin"}
    publish(monkeypatch, "cifar10", server.publish("cifar.tar.gz", tar_gz(members)))
    with pytest.raises(DatasetError, match=r"^test_batch.bin: not in what was downloaded"):
        load("cifar10")


def test_archive_cannot_write_outside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    victim = write(tmp_path / "victim", b"untouched")
    link = tarfile.TarInfo("data_batch_1.bin")
    link.type, link.linkname = tarfile.SYMTYPE, str(victim)
    hostile = {"../../evil": b"evil", f"{tmp_path}/absolute": b"evil", "../../../test_batch.bin": b"evil", "extra": b""}
    good = {f"{CIFAR10_FOLDER}/{name}": content for name, content in cifar10_files().items()}
    publish(monkeypatch, "cifar10", server.publish("cifar.tar.gz", tar_gz({**hostile, **good}, link)))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert len(load("cifar10").train) == 20
    cache = tmp_path / "cache" / "paceline" / CIFAR10_FOLDER
    after = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert after - before - {cache / ".lock"} == {cache / name for name in CIFAR10_NAMES}
    assert victim.read_bytes() == b"untouched"
