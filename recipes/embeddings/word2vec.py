"""Learns vectors of words from the words around them, by skip-grams with negative sampling.

    python recipes/embeddings/word2vec.py --nearest warranty
    paceline run recipes/embeddings/word2vec.py --strategy ps-asp --workers 2 --option servers=2
    python recipes/embeddings/word2vec.py --corpus novel.txt letters.txt

The method is that of Mikolov et al., "Distributed representations of words and phrases and their compositionality",
NIPS 2013, sections 2.2 and 2.3. One thing is added: each element of a vector has a weight, which is learnt too and
begins as 1.
"""

import argparse
from pathlib import Path

import torch
from corpus import licences, negatives, pairs, read
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.nn import ShardedEmbedding


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, nargs="+", help="files of text (default: this system's licence texts)")
    parser.add_argument("--min-count", type=int, default=5, help="leave out words that come up less often")
    parser.add_argument("--window", type=int, default=4, help="words to each side, at most")
    parser.add_argument("--negatives", type=int, default=5, help="words drawn for each that stands there")
    parser.add_argument("--dim", type=int, default=32, help="elements of a word's vector")
    parser.add_argument("--optimizer", default="adagrad:lr=0.1", help="of the rows")
    parser.add_argument("--lr", type=float, default=0.01, help="of what is no row")
    parser.add_argument("--batch-size", type=int, default=256, help="pairs of words a step")
    parser.add_argument("--passes", type=int, default=3, help="over all pairs")
    parser.add_argument("--nearest", nargs="*", default=[], help="words whose neighbours to print at the end")
    return parser.parse_args()


class SkipGrams(nn.Module):
    """How likely words are to stand near one another: affine in the products of their vectors."""

    def __init__(self, num_words: int, dim: int, optimizer: str) -> None:
        super().__init__()
        self.words = ShardedEmbedding(num_words, dim, optimizer=optimizer, name="words", std=0.1)
        self.contexts = ShardedEmbedding(num_words, dim, optimizer=optimizer, name="contexts", std=0.02)
        self.weights = nn.Linear(dim, 1)
        nn.init.ones_(self.weights.weight)
        nn.init.zeros_(self.weights.bias)

    def forward(self, words: Tensor, contexts: Tensor) -> Tensor:
        """Logits of shape (batch, n), for words of shape (batch,) and contexts of shape (batch, n)."""
        logits: Tensor = self.weights(self.words(words).unsqueeze(1) * self.contexts(contexts))
        return logits[:, :, 0]

    def nearest(self, word: int) -> list[int]:
        """The ten words, or all if there are fewer, whose vectors have the smallest angles with this one's."""
        vectors = F.normalize(self.words(torch.arange(self.words.num_rows)))
        return [each for each in (vectors @ vectors[word]).argsort(descending=True).tolist() if each != word][:10]


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    corpus = read(args.corpus or licences(), min_count=args.min_count)
    if unknown := set(args.nearest).difference(corpus.words):
        raise ValueError(
            f"--nearest: {', '.join(sorted(unknown))}: the text has no such word {args.min_count} times (--min-count); "
            "write words in lower case"
        )
    found = pairs(corpus, window=args.window)
    cut = len(found[0]) // 10
    held_out, train = (TensorDataset(*(each[part] for each in found)) for part in (slice(cut), slice(cut, None)))
    model = SkipGrams(len(corpus.words), args.dim, args.optimizer)
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    loader = DataLoader(train, args.batch_size, shuffle=True)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    others = negatives(corpus, (cut, args.negatives), torch.Generator().manual_seed(1))

    @worker.evaluation
    def judge(model: SkipGrams) -> dict[str, float]:
        return {"loss": float(loss_of(model, *held_out.tensors, others))}

    for _ in range(args.passes):
        for words, contexts in loader:
            optimizer.zero_grad()
            loss = loss_of(model, words, contexts, negatives(corpus, (len(words), args.negatives)))
            loss.backward()
            optimizer.step()
            worker.log(loss=loss)
    for word in args.nearest if worker.rank == 0 else []:
        nearest = model.nearest(corpus.words.index(word))
        print(f"{word}: {', '.join(corpus.words[each] for each in nearest)}")


def loss_of(model: nn.Module, words: Tensor, contexts: Tensor, others: Tensor) -> Tensor:
    """Mean over pairs: the logistic loss of telling the context from the words that were drawn."""
    logits: Tensor = model(words, torch.cat([contexts.unsqueeze(1), others], dim=1))
    signs = torch.ones(logits.shape[1]).index_fill(0, torch.tensor(0), -1)
    return F.softplus(signs * logits).sum(dim=1).mean()


if __name__ == "__main__":
    main()
