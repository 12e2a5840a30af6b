"""Trains a small GAN: two models, two optimizers, and two backward passes a step.

    python recipes/gan.py --data-set digits --epochs 20
    paceline run recipes/gan.py --strategy ps-bsp --workers 2 -- --data-set mnist --epochs 5

Digits come with Paceline. Other data sets are taken from --data, or from the folder in PACELINE_DATA, or downloaded.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader

import paceline
from paceline.data import NAMES, Dataset, collate, load


def make_generator(shape: tuple[int, int, int], *, latent: int, width: int) -> nn.Module:
    """From latent vectors [B, latent] to images [B, C, H, W]; H and W are multiples of 4.

    Without batch norm: each worker would normalise with its own batch, and no longer train as one process does.
    """
    channels, height, width_px = shape
    return nn.Sequential(
        nn.Linear(latent, 2 * width * (height // 4) * (width_px // 4)),
        nn.ReLU(),
        nn.Unflatten(1, (2 * width, height // 4, width_px // 4)),
        nn.ConvTranspose2d(2 * width, width, kernel_size=4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(width, channels, kernel_size=4, stride=2, padding=1),
    )


def make_discriminator(shape: tuple[int, int, int], *, width: int) -> nn.Module:
    """From images [B, C, H, W] to one logit each [B, 1]."""
    channels, height, width_px = shape
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel_size=4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, kernel_size=4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 4) * (width_px // 4), 1),
    )


class Noise:
    """Latent vectors of every global batch, of which each worker takes its part: what one process would draw."""

    def __init__(self, worker: Any, *, latent: int) -> None:
        self._worker, self._latent = worker, latent
        self._num_drawn = 0

    def draw(self, count: int) -> Tensor:
        """[count, latent]"""
        generator = torch.Generator().manual_seed(self._num_drawn)
        self._num_drawn += 1
        whole = torch.randn(self._worker.size * count, self._latent, generator=generator)
        return whole[self._worker.rank * count :][:count]

    def state_dict(self) -> dict[str, int]:
        return {"num_drawn": self._num_drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num_drawn = state["num_drawn"]


def train(worker: Any, data_set: Dataset, args: argparse.Namespace) -> tuple[nn.Module, nn.Module]:
    """Returns generator and discriminator."""
    generator = make_generator(data_set.shape, latent=args.latent, width=args.width)
    discriminator = make_discriminator(data_set.shape, width=args.width)
    noise = Noise(worker, latent=args.latent)
    generator, discriminator, optimizer_g, optimizer_d, data = worker.prepare(
        generator=generator,
        discriminator=discriminator,
        optimizer_g=Adam(generator.parameters(), args.lr, betas=(0.5, 0.999)),
        optimizer_d=Adam(discriminator.parameters(), args.lr, betas=(0.5, 0.999)),
        data=DataLoader(data_set.train, batch_size=args.batch_size, shuffle=True, drop_last=True, collate_fn=collate),
        noise=noise,
    )

    @worker.evaluation
    def distance(generator: nn.Module, discriminator: nn.Module) -> dict[str, float]:
        seeded = torch.Generator().manual_seed(0)
        real, _ = data_set.test[: args.eval_samples]
        made = generator(torch.randn(len(real), args.latent, generator=seeded).to(worker.device)).cpu()
        return {"distance": sliced_distance(real.flatten(1), made.flatten(1), generator=seeded)}

    for _ in range(args.epochs):
        for real, _ in data:
            real = real.to(worker.device)
            made = generator(noise.draw(len(real)).to(worker.device))
            optimizer_d.zero_grad()
            loss_d = judged(discriminator(real), is_real=True) + judged(discriminator(made.detach()), is_real=False)
            loss_d.backward()
            optimizer_d.step()

            discriminator.requires_grad_(False)  # it only passes the generator's gradient on
            optimizer_g.zero_grad()
            loss_g = judged(discriminator(made), is_real=True)
            loss_g.backward()
            optimizer_g.step()
            discriminator.requires_grad_(True)
            worker.log(loss_g=loss_g, loss_d=loss_d)
    return generator, discriminator


def judged(logits: Tensor, *, is_real: bool) -> Tensor:
    """The discriminator's loss for images that are all real, or all made."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def sliced_distance(first: Tensor, second: Tensor, *, generator: torch.Generator, num_slices: int = 64) -> float:
    """The mean Wasserstein distance of two sets of as many points [N, D], seen along random directions (Rabin et al.,
    "Wasserstein Barycenter and Its Application to Texture Mixing", 2011)."""
    directions = F.normalize(torch.randn(first.shape[1], num_slices, generator=generator), dim=0)
    return float(((first @ directions).sort(0).values - (second @ directions).sort(0).values).abs().mean())


def parse_arguments(texts: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-set", choices=NAMES, default="mnist")
    parser.add_argument("--latent", type=int, default=32, help="numbers that an image is made from")
    parser.add_argument("--width", type=int, default=16, help="channels of the inner layers")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=64, help="images per worker and step")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--eval-samples", type=int, default=1000, metavar="N", help="compare with N test images")
    parser.add_argument("--data", metavar="DIR", help="folder of the data set, or its parent")
    return parser.parse_args(texts)


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    train(worker, load(args.data_set, directory=args.data), args)


if __name__ == "__main__":
    main()
