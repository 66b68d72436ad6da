"""torchrun whose ranks are forked from it: torch and the engine are imported once, not once a rank.

It is torchrun's own agent, `--start-method=fork`, given a function instead of a command line. A rank is then
there in milliseconds, where an import of torch takes seconds of every core, and all ranks share the memory of the code.
For ranks on the CPU under Linux only: a process that has touched CUDA must not be forked, and macOS's
frameworks do not survive it. Nothing has run yet when torchrun forks, so no thread pool is lost with it.
"""

from __future__ import annotations

import importlib
import logging
import os
import runpy
import signal
import sys
import traceback

from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch

PRELOADED = "labkit.engine.runner"
"""What every rank imports, but for the module that it is: that one runs as its `__main__`."""


def main(arguments: list[str]) -> None:
    """As `torchrun ARGUMENTS`; they end with `-m MODULE`. Raises what torchrun raises."""
    given = run.parse_args(arguments)
    config, _, _ = run.config_from_args(given)
    importlib.import_module(PRELOADED)
    _log_plainly()
    elastic_launch(config, be_a_rank)(given.training_script)


def _log_plainly() -> None:
    """torch's own formatter would import its compiler to show an exception: failures would be told two seconds late."""
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.StreamHandler())
    elastic.propagate = False


def be_a_rank(module: str) -> None:
    """In the forked process, with torchrun's variables set and its streams in the rank's log. Does not return."""
    for taken in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # torchrun's own handlers came along
        signal.signal(taken, signal.SIG_DFL)
    _leave_stdin()
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = _status(end)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leave_stdin() -> None:
    """It is the owner's pipe to torchrun."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _status(end: SystemExit) -> int:
    """What Python makes of it: a text is printed and means 1."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
