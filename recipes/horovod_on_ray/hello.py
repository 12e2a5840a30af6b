"""Every worker says its rank, and hears the sum of all: python recipes/horovod_on_ray/hello.py"""

import ray
import torch

from paceline.horovod.ray import RayExecutor


def hello(greeting: str) -> str:
    import paceline.horovod.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum)
    return f"{greeting} from rank {hvd.rank()}; ranks add up to {total:.0f}"


def main(workers: int = 2) -> list[str]:
    if not ray.is_initialized():
        ray.init()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=workers)
    executor.start()
    try:
        return executor.run(hello, args=["hello"])
    finally:
        executor.shutdown()


if __name__ == "__main__":
    print("\n".join(main()))
