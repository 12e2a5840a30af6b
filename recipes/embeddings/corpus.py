"""Text as numbers of words, and pairs of words that stand near one another."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_LICENCES = Path("/usr/share/common-licenses")
_COMMON = 1e-3
"""Words that are a larger part of the text than this are left out now and then."""


class Corpus(NamedTuple):
    words: list[str]
    """By number, the commonest first."""
    counts: Tensor
    """How often each comes up, shape (words,)."""
    text: Tensor
    """Numbers of words, one after the other."""


def licences() -> list[Path]:
    """Debian's copies. Raises FileNotFoundError if this system has none."""
    found = sorted({path.resolve() for path in _LICENCES.glob("*")})
    if not found:
        raise FileNotFoundError(f"{_LICENCES} has no texts; name some with --corpus")
    return found


def read(paths: Sequence[Path], *, min_count: int) -> Corpus:
    """Words are runs of letters, in lower case. Raises ValueError if none comes up `min_count` times."""
    text = [
        word for path in paths for word in re.findall(r"[^\W\d_]+", path.read_text("utf-8", errors="replace").lower())
    ]
    common = [(word, count) for word, count in Counter(text).most_common() if count >= min_count]
    if not common:
        raise ValueError(f"{', '.join(map(str, paths))}: no word comes up {min_count} times; lower --min-count")
    numbers = {word: number for number, (word, _) in enumerate(common)}
    known = torch.tensor([numbers[word] for word in text if word in numbers])
    return Corpus(list(numbers), torch.tensor([count for _, count in common]), known)


def pairs(corpus: Corpus, *, window: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Words, and the words beside them, each of shape (pairs,), in random order.

    Common words are left out with probability 1 - sqrt(1e-3 / share), and words at distance d count with probability
    1 - (d - 1) / window (Mikolov et al., NIPS 2013, section 2.3, and their implementation).
    """
    generator = torch.Generator().manual_seed(seed)
    kept = (_COMMON * corpus.counts.sum() / corpus.counts).sqrt()[corpus.text]
    text = corpus.text[torch.rand(len(kept), generator=generator) < kept]
    found = []
    for distance in range(1, window + 1):
        both = torch.stack([text[:-distance], text[distance:]])
        found += [
            each[:, torch.rand(each.shape[1], generator=generator) < 1 - (distance - 1) / window]
            for each in (both, both.flip(0))
        ]
    together = torch.cat(found, dim=1)
    words, contexts = together[:, torch.randperm(together.shape[1], generator=generator)]
    return words, contexts


def negatives(corpus: Corpus, shape: tuple[int, int], generator: torch.Generator | None = None) -> Tensor:
    """Words that come up in proportion to their count to the power of 3 / 4."""
    shares = corpus.counts.double().pow(0.75).cumsum(0)
    return torch.searchsorted(shares, torch.rand(shape, generator=generator, dtype=torch.float64) * shares[-1])
