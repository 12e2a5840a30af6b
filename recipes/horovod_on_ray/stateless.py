"""One function trains on every worker: python recipes/horovod_on_ray/stateless.py"""

import ray
import torch

from paceline.horovod.ray import RayExecutor


def train(steps: int, lr: float) -> tuple[float, list[float]]:
    """The last loss on this worker's samples, and the weights, which are the same on all."""
    import paceline.horovod.torch as hvd

    hvd.init()
    generator = torch.Generator().manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(steps):
        x = torch.randn(32, 3, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item(), model.weight.flatten().tolist()


def main(workers: int = 2) -> list[tuple[float, list[float]]]:
    if not ray.is_initialized():
        ray.init()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=workers)
    executor.start()
    try:
        return executor.run(train, kwargs={"steps": 100, "lr": 0.1})
    finally:
        executor.shutdown()


if __name__ == "__main__":
    for rank, (loss, weights) in enumerate(main()):
        print(f"rank {rank}: loss {loss:.5f}, weights {weights}")
