"""The collective over torch.distributed: gloo between hosts, NCCL between GPUs."""
