"""The same load, client and figures on a production engine that is started for the run and ended with it.

A model of ours that is only a config is written once as a checkpoint, with the very weights that our ranks make up, so
that `labkit run --layout tp2` and `labkit run --engine vllm --layout tp2` serve the same numbers.
"""

from __future__ import annotations

import itertools
import platform
import shlex
from collections.abc import Sequence
from typing import Any

from labkit.cluster.engine_plan import SERVED_NAME, EnginePlan, find_engine
from labkit.cluster.engines import START_TIMEOUT_S, EngineServer, OnLine, fetch, started
from labkit.cluster.topology import Machine, default_threads, look_at_machine
from labkit.lab.engine_model import DEFAULT_MODEL, serve_model
from labkit.lab.plan import as_layout, new_run_id, plan_of, utc_now
from labkit.lab.run import Run, open_store
from labkit.lab.running import OnUpdate, Recording, begin, finish
from labkit.lab.summary import Setting
from labkit.layout import AnyLayout, Layout
from labkit.load.driver import DriverProcess
from labkit.load.engine_metrics import Sampler
from labkit.load.target import Target
from labkit.load.workload import Workload
from labkit.measure.records import Environment
from labkit.plan.deploy import DeployFlags, deploy_flags


def run_engine(
    engine: str,
    layout: AnyLayout | str = "tp1",
    workload: str | Workload = "chat",
    rate: float | None = None,
    seconds: float | None = None,
    *,
    model: str = DEFAULT_MODEL,
    engine_args: str | Sequence[str] = (),
    python: str = "",
    endpoint: str = "completions",
    prompt_mode: str = "ids",
    on_line: OnLine | None = None,
    on_update: OnUpdate | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    **more: Any,
) -> Run:
    """Start `engine` (vllm or sglang) with the flags of `layout`, send the load, measure it, end the server.

    model: a name under data/models (its random weights are exported once), a folder with a checkpoint, or a name that
    the engine downloads. engine_args: appended to its command. python: the Python that has the engine. on_line: called
    with (seconds, line) as its log grows while it starts. `more`: the other fields of RunPlan. Raises EngineError,
    LayoutError or ValueError, each with a sentence. Ctrl-C ends the run early and keeps what was measured.
    """
    layout = as_layout(layout or "tp1")
    plan = plan_of(layout, workload, rate, seconds, **more)
    flags = deploy_flags(engine, layout)
    program = find_engine(engine, python)
    extra = _words(engine_args)
    served = serve_model(model, flags.layout, on_line)
    start = EnginePlan(engine, program, served.path, flags.flags, flags.layout.world_size, flags.environment, extra)
    run_id, machine = new_run_id(f"{engine}-{flags.layout.slug}"), look_at_machine()
    recording = Recording(plan, run_id, on_update)
    with open_store() as store:
        log = store.run_dir(run_id) / f"{engine}.log"
    with DriverProcess() as driver, started(start, machine, log, on_line, start_timeout_s) as server:
        about = _about(server, flags)
        begin(recording, flags.layout.slug, served.name, server.url)
        target = Target(url=server.url, model=SERVED_NAME, endpoint=endpoint, prompt_mode=prompt_mode)
        spec = plan.spec(target, run_id, served.vocab_size, server.served().get("max_model_len"))
        with Sampler(engine, lambda: fetch(f"{server.url}/metrics")) as sampler:
            recording.drive(driver, spec, server.check)
        recording.joiner.expire(everything=True)
        about["metrics"] = sampler.metrics.summary()
    where = Setting(
        model=served.name,
        layout=flags.layout.slug,
        environment=_environment(server, flags.layout, machine, about["version"]),
        settings={"engine_args": extra},
        engine=about,
        notices=[*flags.notes, *(flags.mixture_notes if served.has_experts else ()), *recording.notices],
    )
    return finish(recording, where)


def _words(engine_args: str | Sequence[str]) -> list[str]:
    if not isinstance(engine_args, str):
        return list(engine_args)
    try:
        return shlex.split(engine_args)
    except ValueError as error:
        raise ValueError(
            f"--engine-args {engine_args!r} cannot be taken apart as a shell would ({error}): close its quotes."
        ) from error


def _about(server: EngineServer, flags: DeployFlags) -> dict[str, Any]:
    """What the run's record says of the engine."""
    return {
        "name": flags.engine,
        "version": server.version(),
        "command": server.command,
        "flags": list(flags.flags),
        "variables": server.variables,
        "start_s": round(server.start_s, 3),
        "log": str(server.log),
    }


def _environment(server: EngineServer, layout: Layout, machine: Machine, version: str) -> Environment:
    on_gpus = bool(machine.gpus)
    return Environment(
        host=machine.host,
        backend=machine.backend,
        fabric=f"{server.plan.engine}'s own",
        device=machine.gpus[0].name if on_gpus else platform.processor() or platform.machine(),
        num_cores=machine.num_cores,
        num_ranks=layout.world_size,
        threads_per_rank=1 if on_gpus else default_threads(machine.num_cores, layout.world_size),
        dtype=_said(server.command, "--dtype") or "auto",
        versions={server.plan.engine: version},
        seed=0,
        started_at=utc_now(),
    )


def _said(command: Sequence[str], option: str) -> str:
    """An option's last value, which is the one that counts."""
    values = [after for word, after in itertools.pairwise(command) if word == option]
    values += [word.partition("=")[2] for word in command if word.startswith(f"{option}=")]
    return values[-1] if values else ""
