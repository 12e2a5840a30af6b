"""Short sentences about food or weather, made up from a few words, for classifiers that are to be seen at work."""

import random

import torch
from torch.utils.data import TensorDataset

LENGTH = 6
"""Words of a sentence."""
_COMMON = ["the", "a", "was", "and", "very", "not", "today", "again", "here", "we"]
_TOPICS = [["soup", "bread", "spicy", "fresh", "lunch", "salt"], ["rain", "wind", "cloudy", "cold", "storm", "sun"]]
_WORDS = [*_COMMON, *_TOPICS[0], *_TOPICS[1]]
NUM_WORDS = len(_WORDS)
NUM_TOPICS = len(_TOPICS)


def sentences(number: int, *, seed: int) -> TensorDataset:
    """Word numbers (number, LENGTH), and topics (number,). A sentence has two words of its topic, and at times one of
    the other."""
    draw = random.Random(seed)
    texts, topics = [], []
    for _ in range(number):
        topic = draw.randrange(NUM_TOPICS)
        words = draw.choices(_TOPICS[topic], k=2) + draw.choices(_COMMON, k=LENGTH - 2)
        if draw.random() < 0.3:
            words[-1] = draw.choice(_TOPICS[1 - topic])
        draw.shuffle(words)
        texts.append([_WORDS.index(word) for word in words])
        topics.append(topic)
    return TensorDataset(torch.tensor(texts), torch.tensor(topics))
