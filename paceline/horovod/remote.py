"""One rank on one host, as `hosts.py` starts it: says hello, is told what to run, and ends when its input does."""

import json
import os
import signal
import socket
import sys
import threading
from typing import TextIO

from paceline.comm.hosts import own_ip_address
from paceline.engines.scripting import Script, outcome_of, run_program

_LEAVE_WITHIN_S = 5.0


def main() -> None:
    told = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())  # the script has no input
    with socket.socket() as probe:
        probe.bind(("", 0))
        print(json.dumps({"address": own_ip_address(), "port": probe.getsockname()[1]}), flush=True)
    line = told.readline()
    if not line:
        return
    job = json.loads(line)
    os.environ.update(job["variables"])
    about = job["script"]
    script = Script(**{**about, "arguments": tuple(about["arguments"]), "aliases": tuple(about["aliases"])})
    threading.Thread(target=_end_with, args=(told,), name="paceline launcher's line", daemon=True).start()
    try:
        run_program(script)
    except Exception as error:
        outcome = outcome_of(error, num_steps=0)
        sys.exit(outcome.traceback or outcome.error)


def _end_with(told: TextIO) -> None:
    """The launcher holds the other end for as long as it wants this rank to run."""
    told.read()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_LEAVE_WITHIN_S)  # a script may catch the signal, but not stay
    os._exit(1)


if __name__ == "__main__":
    main()
