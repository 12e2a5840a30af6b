"""A folder for `PYTHONPATH`: the package in it is found as `horovod`."""
