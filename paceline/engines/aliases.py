"""Packages that a script may import where they are not installed, because Paceline has their interface."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

_IDENTITY = ("__name__", "__spec__", "__loader__", "__package__")
ALIASES = {"horovod": "paceline.horovod"}
_NOT_BUILT = {
    "horovod.tensorflow": "use TensorFlow's own distribution strategies",
    "horovod.keras": "use TensorFlow's own distribution strategies",
    "horovod.mxnet": "MXNet is no longer maintained",
    "horovod.spark": "start the script with `paceline run`",
}


def missing(source: str) -> tuple[str, ...]:
    """Packages that a script's text mentions, that are not installed, and that have a stand-in here."""
    return tuple(name for name in ALIASES if name in source and not _is_installed(name))


def install(names: Sequence[str]) -> None:
    """Have `import` find the stand-ins of these packages. One that is installed is never touched."""
    for name in names:
        if not _stands_in(name) and not _is_installed(name):
            # First, since the stand-in has a path, along which its modules would be loaded a second time.
            sys.meta_path.insert(0, _Finder(name, ALIASES[name]))


def _stands_in(name: str) -> bool:
    """Whether `install` was called in this process."""
    return any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path)


def _is_installed(name: str) -> bool:
    if _stands_in(name):
        return False
    return name in sys.modules or importlib.util.find_spec(name) is not None


@final
class _Finder(MetaPathFinder, Loader):
    """Gives the modules of one package under another's name; the same objects, not copies."""

    def __init__(self, name: str, stand_in: str) -> None:
        self.name, self._stand_in = name, stand_in
        self._kept: dict[str, dict[str, Any]] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        if fullname in _NOT_BUILT:
            raise ImportError(f"{fullname} is not part of Paceline's Horovod: {_NOT_BUILT[fullname]}", name=fullname)
        own = self._own_name(fullname)
        if importlib.util.find_spec(own) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own_name(spec.name))
        self._kept[spec.name] = {name: getattr(module, name) for name in _IDENTITY}
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its own name, which it keeps."""
        spec = module.__spec__
        assert spec is not None
        for name, value in self._kept.pop(spec.name).items():
            setattr(module, name, value)

    def _own_name(self, fullname: str) -> str:
        return self._stand_in + fullname.removeprefix(self.name)
