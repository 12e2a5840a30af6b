"""Runs test files of Horovod's own, of a checkout that the caller has, on Paceline under Horovod's name.

    python tests/horovod/upstream.py CHECKOUT test/parallel/test_torch.py --workers 2
    python tests/horovod/upstream.py CHECKOUT test/single/test_ray.py -- -k local

Files of `test/parallel` run on every worker, all others once. What follows `--` goes to pytest. What those files share
needs the package `mock`, and helpers of Horovod's launcher (`horovod.runner`), which are taken from the checkout; jobs
that files of `test/integration` start go to Paceline's launcher.
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
_RAY, _LAUNCHER, _UNSKIP = "todays_ray", "own_launcher", "no_skips"
_HELPERS_OWN = """
import functools

import horovod.common.util

horovod.common.util._cache = functools.cache  # of which the launcher's helpers make use
"""
_PLUGINS = {
    _RAY: _HELPERS_OWN
    + """
import ray

import paceline.horovod.ray.elastic
import paceline.horovod.ray.runner
from horovod.runner.elastic import driver
from paceline.horovod.ray import elastic_workers

OwnLoop = elastic_workers.Loop
elastic_workers.Loop = lambda *given, **named: OwnLoop(
    *given, **{**named, "look_every_s": driver.DISCOVER_HOSTS_FREQUENCY_SECS}
)
for module in (paceline.horovod.ray.elastic, paceline.horovod.ray.runner):
    module.Policy = functools.partial(module.Policy, tells_early=True)  # as the tests count looks at the hosts

_init = ray.init
ray.init = lambda *given, _redis_max_memory=None, **named: _init(*given, **named)  # which Ray has no longer
""",
    _LAUNCHER: _HELPERS_OWN
    + """
import os
import tempfile

import horovod.runner
from horovod.runner import launch
from horovod.runner.elastic import constants, driver
import paceline.horovod
from paceline.cli.horovodrun import horovodrun
from paceline.errors import RunFailed
from paceline.horovod.elastic_jobs import launch as own, options

OwnLaunch, OwnPolicy = own.ElasticLaunch, options.Policy


def run_elastic(args):
    command = [*args.command]
    if command[1:] == ["-V"]:  # which is no script
        command[1] = os.path.join(tempfile.mkdtemp(), "version.py")
        with open(command[1], "w") as script:
            script.write("import sys; print(sys.version)")
    own.ElasticLaunch = functools.partial(OwnLaunch, look_every_s=driver.DISCOVER_HOSTS_FREQUENCY_SECS)
    # The tests expect that a host's name has been heard within three seconds, however long its workers take to start.
    options.Policy = functools.partial(OwnPolicy, tells_early=True)
    options.Policy.elastic_timeout_s = args.elastic_timeout or driver.ELASTIC_TIMEOUT_SECS
    try:
        horovodrun(
            command,
            num_proc=args.num_proc,
            hosts=args.hosts,
            host_discovery_script=args.host_discovery_script,
            min_num_proc=args.min_num_proc,
            max_num_proc=args.max_num_proc,
            slots_per_host=args.slots,
            reset_limit=args.reset_limit,
            blacklist_cooldown_range=args.cooldown_range,
        )
    except RunFailed as error:
        if "--reset-limit" in str(error):
            raise RuntimeError(constants.RESET_LIMIT_EXCEEDED_MESSAGE.format(args.reset_limit)) from error
        raise


horovod.runner.run = paceline.horovod.run
launch._run_elastic = launch._run = run_elastic
""",
    _UNSKIP: """
import inspect


def pytest_pycollect_makeitem(collector, name, obj):
    if inspect.isclass(obj):
        for test, function in [*vars(obj).items()]:
            inherited = any(hasattr(base, test) for base in obj.__bases__)
            if inherited and inspect.isfunction(function) and "self.skipTest(" in inspect.getsource(function):
                delattr(obj, test)  # the inherited one is run
""",
}
_PLAIN = ("-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "-q")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-skips", action="store_true", help="run inherited tests though a class skips them")
    arguments, rest = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, rest = arguments[:at], arguments[at + 1 :]
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        own = _ALIAS + _HELPERS.format(str((asked.checkout / "horovod").resolve())) + _LAUNCHED
        Path(place, "sitecustomize.py").write_text(own)  # what every process of Python's loads, Ray's too
        for name, text in _PLUGINS.items():
            Path(place, f"{name}.py").write_text(text)
        path = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        rest = [*rest, *(["-p", _UNSKIP] if asked.no_skips else [])]
        return max(_run(asked.checkout / name, asked.workers, rest, environment) for name in asked.files)


def _run(file: Path, workers: int, rest: list[str], environment: dict[str, str]) -> int:
    plugins = ["-p", _RAY] if "ray" in file.name else ["-p", _LAUNCHER] if file.parent.name == "integration" else []
    command = ["-m", "pytest", *_PLAIN, *plugins, str(file), *rest]
    if file.parent.name == "parallel":
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(workers), *command]
    return subprocess.run([sys.executable, *command], env=environment, cwd=file.parent, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
