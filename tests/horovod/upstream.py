"""Runs test files of Horovod's own, of a checkout that the caller has, on Paceline under Horovod's name.

    python tests/horovod/upstream.py CHECKOUT test/parallel/test_torch.py --workers 2
    python tests/horovod/upstream.py CHECKOUT test/single/test_ray.py -- -k local

Files of `test/parallel` run on every worker, all others once. What follows `--` goes to pytest. What those files share
needs the package `mock`, and helpers of Horovod's launcher (`horovod.runner`), which are taken from the checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_ALIAS = 'from paceline.engines import aliases\n\naliases.install(["horovod"])\n'
_HELPERS = "import paceline.horovod\n\npaceline.horovod.__path__.append({!r})  # behind Paceline's own modules\n"
_LAUNCHED = """
import os

for name in ("RANK", "LOCAL_RANK"):  # as Horovod's launcher sets them
    if name in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        os.environ.setdefault(f"HOROVOD_{name}", os.environ[name])
        size = name.replace("RANK", "WORLD_SIZE")
        os.environ.setdefault(f"HOROVOD_{size.replace('WORLD_', '')}", os.environ[size])
"""
_PLUGIN = "todays_ray"
_TODAYS_RAY = """
import ray

_init = ray.init
ray.init = lambda *given, _redis_max_memory=None, **named: _init(*given, **named)  # which Ray has no longer
"""
_PLAIN = ("-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "-q")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    arguments, rest = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, rest = arguments[:at], arguments[at + 1 :]
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        own = _ALIAS + _HELPERS.format(str((asked.checkout / "horovod").resolve())) + _LAUNCHED
        Path(place, "sitecustomize.py").write_text(own)  # what every process of Python's loads, Ray's too
        Path(place, f"{_PLUGIN}.py").write_text(_TODAYS_RAY)
        path = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        return max(_run(asked.checkout / name, asked.workers, rest, environment) for name in asked.files)


def _run(file: Path, workers: int, rest: list[str], environment: dict[str, str]) -> int:
    plugins = ["-p", _PLUGIN] if "ray" in file.name else []
    command = ["-m", "pytest", *_PLAIN, *plugins, str(file), *rest]
    if file.parent.name == "parallel":
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(workers), *command]
    return subprocess.run([sys.executable, *command], env=environment, cwd=file.parent, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
