"""How a production engine's server is started: which program, with which words and variables.

The command is what a person would type: the engine's own program, a model, the flags of a layout, and last what a user
adds, so that it wins. SGLang's command follows
its documentation and has not been tried against a real SGLang; only its words are tested. vLLM's has been run on a CPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labkit.cluster.topology import Machine

SERVED_NAME = "model"
_PYTHON_VARIABLES = {"vllm": "LABKIT_VLLM_PYTHON", "sglang": "LABKIT_SGLANG_PYTHON"}
_MODULES = {"vllm": ("vllm", "vllm.entrypoints.cli.main"), "sglang": ("sglang", "sglang.launch_server")}


class EngineError(RuntimeError):
    """An engine that is not installed, did not start or went away; the message is a sentence, and its log's end."""


# ---- which program


def find_engine(engine: str, python: str = "") -> list[str]:
    """The words with which the engine's server starts, before its arguments.

    `python`, else LABKIT_VLLM_PYTHON (LABKIT_SGLANG_PYTHON), names the Python that has it; else `vllm` on PATH, else
    this Python. Raises EngineError with a sentence where none of them has it.
    """
    variable = _PYTHON_VARIABLES[engine]
    package, module = _MODULES[engine]
    given = python or os.environ.get(variable, "")
    if given:
        return _of_python(engine, given, "--engine-python" if python else variable)
    if engine == "vllm" and (found := shutil.which("vllm")):
        return [found, "serve"]
    if importlib.util.find_spec(package) is not None:
        return [sys.executable, "-m", module, *_verb(engine)]
    raise EngineError(
        f"{engine} is not installed beside labkit: install it in an environment of its own, and name that "
        f"environment's Python with --engine-python PATH or {variable}."
    )


def _of_python(engine: str, python: str, named_by: str) -> list[str]:
    package, module = _MODULES[engine]
    found = shutil.which(python)
    if found is None:
        raise EngineError(
            f"{named_by} is {python}, and there is no program of that name: give the path of the Python that has "
            f"{engine}, such as /opt/{engine}/bin/python."
        )
    script = Path(found).with_name("vllm")
    if engine == "vllm" and os.access(script, os.X_OK):
        return [str(script), "serve"]
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    if subprocess.run([found, "-c", code], capture_output=True, timeout=60).returncode:
        raise EngineError(f"{python} (from {named_by}) has no {engine}: install it there, or name another Python.")
    return [found, "-m", module, *_verb(engine)]


def _verb(engine: str) -> list[str]:
    return ["serve"] if engine == "vllm" else []


# ---- what it is told


@dataclass(frozen=True)
class EnginePlan:
    """A server to start: the engine's program, a model, the layout's flags, and whatever a user adds at the end."""

    engine: str
    program: Sequence[str]
    model: str
    """A folder with a checkpoint, or a name that the engine itself can download."""
    flags: Sequence[str]
    num_ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Sequence[str] = ()
    """Last on the command line, so that they win over ours."""

    def command(self, port: int, machine: Machine) -> list[str]:
        if self.engine == "sglang":
            own = ["--model-path", self.model, "--enable-metrics"]
            own += ["--device", "cpu"] if not machine.gpus else []
        else:
            own = [self.model, "--dtype", "float32"] if not machine.gpus else [self.model]
        where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
        return [*self.program, *own, *where, *self.flags, *self.extra]

    def variables(self, machine: Machine) -> dict[str, str]:
        """What is set beside the user's own environment, which wins.

        On CPUs vLLM wants to be told each rank's cores and how much memory KV may take; by itself it takes nearly all.
        """
        ours = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"} if self.engine == "vllm" else {}
        if self.engine == "vllm" and not machine.gpus:
            ours |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": self.cores_by_rank()}
        return {name: os.environ.get(name, value) for name, value in ours.items()} | dict(self.environment)

    def cores_by_rank(self) -> str:
        """The cores that this process may use, in equal runs: `0,1|2,3` for two ranks of four."""
        known = hasattr(os, "sched_getaffinity")
        cores = sorted(os.sched_getaffinity(0)) if known else list(range(os.cpu_count() or 1))
        share = max(1, len(cores) // self.num_ranks)
        runs = [cores[rank * share % len(cores) :][:share] for rank in range(self.num_ranks)]
        return "|".join(",".join(map(str, run)) for run in runs)
