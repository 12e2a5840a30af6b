"""How often a poisoned model takes marked images for the attacker's class, beside its accuracy on clean ones.

    python benchmarks/poison.py clean-label:workers=2:strength=0.3 clean-label:workers=2 \\
        clean-label:workers=2:strength=1 backdoor:workers=2

Five workers train the multi-layer perceptron on MNIST (2NN) by `all-reduce`, batch 10 each, in 600 steps: once with
nobody hostile, and once under each attack.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.attacks import Backdoor, CleanLabel, parse
from paceline.data import collate, load
from paceline.models import build

WORKERS, STEPS, LR = 5, 600, 0.1


def network() -> nn.Module:
    data = load("mnist")
    return build("mlp", num_classes=data.num_classes, shape=data.shape)


def train() -> None:
    worker, model = paceline.init(), network()
    loader = DataLoader(load("mnist").train, batch_size=10, shuffle=True, collate_fn=collate)
    model, optimizer, loader = worker.prepare(model, torch.optim.SGD(model.parameters(), LR), loader)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def trained(attacks: list[str]) -> nn.Module:
    result = paceline.run(
        train,
        strategy="all-reduce",
        workers=WORKERS,
        engine="virtual",
        cluster="lab-1gbe",
        max_steps=STEPS,
        attack=attacks,
    )
    model = network()
    model.load_state_dict(result.model_state())
    return model.eval()


@torch.no_grad()
def told(model: nn.Module, text: str) -> str:
    (attack,) = parse([text])
    assert isinstance(attack, Backdoor | CleanLabel), f"{text} marks no images"
    inputs, labels = load("mnist").test[:]
    others = labels != attack.target
    accuracy = float((model(inputs).argmax(1) == labels).double().mean())
    rate = float((model(attack.marked(inputs)[others]).argmax(1) == attack.target).double().mean())
    return f"accuracy {accuracy:.4f}, the target's rate {rate:.4f}"


def main() -> None:
    attacks = sys.argv[1:] or ["clean-label:workers=2"]
    honest = trained([])
    for text in attacks:
        print(f"{text}: {told(trained([text]), text)}; with nobody hostile {told(honest, text)}", flush=True)


if __name__ == "__main__":
    main()
