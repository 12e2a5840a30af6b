"""One rank on one host, as the launcher starts it: says hello, is told what to run, and ends when its input does."""

import base64
import json
import os
import socket
import sys
from typing import Any, TextIO

import cloudpickle

from paceline.comm.hosts import own_ip_address
from paceline.engines import aliases
from paceline.engines.scripting import Program, Script, outcome_of, run_program
from paceline.horovod import commands, worker_line
from paceline.horovod import line as lines


def main() -> None:
    told = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())  # the script has no input
    with socket.socket() as probe:
        probe.bind(("", 0))
        print(json.dumps({"address": own_ip_address(), "port": probe.getsockname()[1]}), flush=True)
    said = told.readline()
    if not said:
        return
    job = json.loads(said)
    os.environ.update(job["variables"])
    try:
        if "command" in job:
            sys.exit(_run_command(job, told))
        line = lines.PipeLine(told, os.dup(1), job["mark"])
        worker_line.use(line, job)
        run_program(_program(job, line))
    except Exception as error:
        outcome = outcome_of(error, num_steps=0)
        sys.exit(outcome.traceback or outcome.error)


def _run_command(job: dict[str, Any], told: TextIO) -> int:
    about = job["command"]
    if os.path.isdir(about["working_directory"]):
        os.chdir(about["working_directory"])
    line = {name: job[name] for name in ("mark", "is_elastic", "is_recorded")}
    return commands.run_command(about["words"], told, line, may_alias=about["may_alias"])


def _program(job: dict[str, Any], line: lines.PipeLine) -> Program:
    if "script" in job:
        about = job["script"]
        return Script(**{**about, "arguments": tuple(about["arguments"]), "aliases": tuple(about["aliases"])})
    aliases.install([*aliases.ALIASES])
    sys.path[:0] = job["path"]
    function = cloudpickle.loads(base64.b64decode(job["function"]))  # over a line that the launcher alone writes to

    def call() -> None:
        result = cloudpickle.dumps(function())
        line.say("result", value=base64.b64encode(result).decode())

    return call


if __name__ == "__main__":
    main()
