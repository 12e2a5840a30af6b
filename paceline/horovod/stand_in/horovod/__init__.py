"""What `import horovod` finds first in processes of a command: an installed Horovod if there is one, or Paceline's."""

import importlib.util
import sys
from pathlib import Path

_HERE = str(Path(__file__).parents[1])
sys.path[:] = [each for each in sys.path if each != _HERE]
del sys.modules["horovod"]
if importlib.util.find_spec("horovod") is None:
    from paceline.engines import aliases  # not before: a Python that has Horovod need not have Paceline

    aliases.install(["horovod"])
importlib.import_module("horovod")
