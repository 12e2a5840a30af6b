"""Trains a text classifier in a loop of Accelerate's, under any strategy.

    paceline run examples/accelerate_text.py --strategy local-sgd:every=8 --workers 2
    paceline run examples/accelerate_text.py --strategy all-reduce --workers 2 -- --resume accelerate-text/3

Needs `pip install paceline[frameworks]`.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from paceline.accelerate import Accelerator  # was: from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parent))
from sentences import NUM_TOPICS, NUM_WORDS, sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--batch-size", type=int, default=16, help="sentences that each worker takes at a time")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a step")
    parser.add_argument("--out", type=Path, default=Path("accelerate-text"), help="where each epoch's state goes")
    parser.add_argument("--resume", type=Path, help="a state to go on from")
    arguments = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=arguments.accumulate)
    model = nn.Sequential(nn.EmbeddingBag(NUM_WORDS, 16), nn.Linear(16, NUM_TOPICS))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    training = DataLoader(sentences(2048, seed=0), batch_size=arguments.batch_size, shuffle=True)
    testing = DataLoader(sentences(512, seed=1), batch_size=64)
    model, optimizer, training, testing = accelerator.prepare(model, optimizer, training, testing)
    first, accuracy = 0, "none"
    if arguments.resume:
        accelerator.load_state(str(arguments.resume))
        first = int(arguments.resume.name)
    for epoch in range(first, arguments.epochs):
        model.train()
        for text, topic in training:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(text), topic))
                optimizer.step()
                optimizer.zero_grad()
        if accelerator.is_over:  # interrupted, or the run's budget is used up, before the epoch's end
            break
        accelerator.save_state(str(arguments.out / str(epoch + 1)))
        model.eval()
        num_right = num = 0
        with torch.no_grad(), accelerator.global_model():
            for text, topic in testing:
                found, wanted = accelerator.gather_for_metrics((model(text).argmax(1), topic))
                num_right += int((found == wanted).sum())
                num += len(wanted)
        accuracy = f"{num_right / num:.3f} of {num}"
    if accelerator.is_main_process:
        print(f"accuracy {accuracy} on {accelerator.num_processes} workers")


if __name__ == "__main__":
    main()
