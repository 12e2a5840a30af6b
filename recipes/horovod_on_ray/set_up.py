"""Workers on Ray's hosts, and which place each has: python recipes/horovod_on_ray/set_up.py"""

import ray

from paceline.horovod.ray import RayExecutor


def place() -> tuple[int, int, int]:
    """This worker's rank, how many there are, and its number on its host."""
    import paceline.horovod.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.size(), hvd.local_rank()


def main(workers: int = 2) -> list[tuple[int, int, int]]:
    if not ray.is_initialized():
        ray.init()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=workers)
    executor.start()
    try:
        return executor.run(place)
    finally:
        executor.shutdown()


if __name__ == "__main__":
    for rank, size, local_rank in main():
        print(f"rank {rank} of {size}, number {local_rank} on its host")
