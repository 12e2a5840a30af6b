"""Workers keep a model from call to call: python recipes/horovod_on_ray/stateful.py"""

import ray
import torch

from paceline.horovod.ray import RayExecutor


class Trainer:
    """What each worker holds."""

    def __init__(self, lr: float) -> None:
        import paceline.horovod.torch as hvd

        hvd.init()
        self.generator = torch.Generator().manual_seed(hvd.rank())
        self.model = torch.nn.Linear(3, 1)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())

    def train(self, steps: int) -> float:
        for _ in range(steps):
            x = torch.randn(32, 3, generator=self.generator)
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def weights(self) -> list[float]:
        weights: list[float] = self.model.weight.flatten().tolist()
        return weights


def main(workers: int = 2) -> tuple[list[list[float]], list[float]]:
    """The losses after each of three calls, and rank 0's weights."""
    if not ray.is_initialized():
        ray.init()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=workers)
    executor.start(executable_cls=Trainer, executable_kwargs={"lr": 0.1})
    try:
        losses = [executor.execute(lambda trainer: trainer.train(30)) for _ in range(3)]
        return losses, executor.execute_single(lambda trainer: trainer.weights())
    finally:
        executor.shutdown()


if __name__ == "__main__":
    losses, weights = main()
    print(f"losses after each call: {losses}\nweights: {weights}")
