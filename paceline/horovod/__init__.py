"""Horovod's interface on Paceline's collectives, so that scripts that say `import horovod.torch as hvd` go on.

Nothing of Horovod is needed, and nothing is compiled. `paceline.horovod.torch` holds the names.
"""
