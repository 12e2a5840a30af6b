"""What scripts import from `horovod.common`."""
