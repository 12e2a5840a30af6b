"""What `import horovod` finds first in processes of a command: an installed Horovod if there is one, or Paceline's."""

import importlib
import sys
from pathlib import Path

from paceline.engines import aliases

_HERE = str(Path(__file__).parents[1])
sys.path[:] = [each for each in sys.path if each != _HERE]
del sys.modules["horovod"]
aliases.install(["horovod"])
importlib.import_module("horovod")
