"""The commands that put a layout into service on vLLM, SGLang or TensorRT-LLM, and the load test of a prediction.

A command is text to paste, with the version it is for and what differs there from the plan. Pools with roles are a
server each and a router before them; a server that spans nodes is a command on each. GPUs are given out in the order of
the layout's ranks, so that its tensor-parallel neighbours are neighbours on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from labkit.layout import AnyLayout, Deployment, Layout, LayoutError
from labkit.model.shapes import ModelSpec
from labkit.plan.command_text import command_text, file_text, yaml_text
from labkit.plan.engine_flags import ENGINE_NAMES, VERSIONS, DeployFlags, deploy_flags, flags_of
from labkit.plan.engine_words import SettingWords, setting_words
from labkit.plan.pools_deploy import POOL_PORT, check_pools, router, transfer_words
from labkit.plan.verify import Limits, Traffic, load_tests
from labkit.plan.work import EngineSettings
from labkit.said import said_by, say

__all__ = ["ALL_ENGINES", "Command", "DeployFlags", "deploy_commands", "deploy_flags", "every_engine"]
ALL_ENGINES = tuple(VERSIONS)
PORT = 8000
_MODEL_WORD = {"vllm": "", "sglang": "--model-path", "trtllm": ""}
_PROGRAM = {
    "vllm": ["vllm", "serve"],
    "sglang": ["python", "-m", "sglang.launch_server"],
    "trtllm": ["trtllm-serve"],
}


@dataclass(frozen=True)
class Command:
    """Text for a shell. `role`: server, a pool's role, router, or load (the test of the prediction)."""

    engine: str
    version: str
    """Of the engine that the words are of."""
    role: str
    text: str
    notes: tuple[str, ...] = ()
    node: int = 0
    """Which machine it runs on."""


@dataclass(frozen=True)
class _Server:
    """One server of a deployment: a layout on GPUs first .. first + world_size − 1."""

    role: str
    layout: Layout
    first: int
    port: int
    kv_index: int = 0
    """Which of the servers that pass on KV; names its side channel."""


@dataclass(frozen=True)
class _Plan:
    engine: str
    served: str
    settings: EngineSettings
    gpus_per_node: int
    pools: bool
    spec: ModelSpec | None = field(default=None)


def deploy_commands(
    layout: AnyLayout,
    model: str | ModelSpec,
    settings: EngineSettings,
    engine: str,
    *,
    workload: Traffic | None = None,
    objective: Limits | None = None,
    served: str = "",
    gpus_per_node: int = 8,
    asked: str = "",
) -> list[Command]:
    """Servers first, then the router, then what verifies the prediction (when there is a workload).

    model: its shapes, with which an engine's own limits are checked, or its name. served: what the engine is given, a
    folder or a name that it downloads; by default the model's name. asked: how the workload was asked for (a name under
    data/workloads, a file, a trace, or `8192/1024`). Raises LayoutError or ValueError, each with a sentence, for what
    the engine does not have.
    """
    spec = model if isinstance(model, ModelSpec) else None
    name = served or (spec.name if spec else str(model))
    plan = _Plan(engine, name, settings, gpus_per_node, isinstance(layout, Deployment), spec)
    if isinstance(layout, Deployment):
        check_pools(engine, layout, spec)
    servers = list(_servers(layout, plan))
    commands = [command for server in servers for command in _of_server(server, plan)]
    if plan.pools:
        text, notes = router(engine, [(server.role, server.port) for server in servers], PORT)
        commands.append(Command(engine, VERSIONS[engine], "router", text, notes))
    if workload is not None:
        balanced = len(servers) > 1 and not plan.pools
        url = "http://YOUR_BALANCER:8000" if balanced else f"http://127.0.0.1:{PORT}"
        for by, version, text, notes in load_tests(name, workload, objective, asked, url):
            commands.append(Command(by, version, "load", text, notes))
    return commands


def every_engine(
    layout: AnyLayout, model: str | ModelSpec, settings: EngineSettings, **more: Any
) -> list[dict[str, Any]]:
    """JSON-ready, an entry an engine: `engine, name, version, refused` (a sentence, or empty) and `commands`."""
    found = []
    for engine in ALL_ENGINES:
        refused, commands = "", []
        try:
            commands = [asdict(command) for command in deploy_commands(layout, model, settings, engine, **more)]
        except ValueError as error:
            refused = said_by(error)
        found.append({"engine": engine, "name": ENGINE_NAMES[engine], "version": VERSIONS[engine],
                      "refused": refused, "commands": commands})  # fmt: skip
    return found


# ---- which servers


def _servers(layout: AnyLayout, plan: _Plan) -> Iterator[_Server]:
    pools = layout.pools if isinstance(layout, Deployment) else [("server", layout, 0)]
    port = POOL_PORT if plan.pools else PORT
    for index, (role, part, first) in enumerate(pools):
        alike = flags_of(plan.engine, part).num_servers
        each = part.world_size // alike
        for copy in range(alike):
            yield _Server(role, part, first + copy * each, port, index * 100 + copy)
            port += 1


def _of_server(server: _Server, plan: _Plan) -> Iterator[Command]:
    flags = flags_of(plan.engine, server.layout)
    if plan.spec is not None:
        _check_spec(plan.engine, server.layout, plan.spec)
    words = setting_words(plan.engine, plan.settings, server.layout)
    size = server.layout.world_size // flags.num_servers
    node = server.first // plan.gpus_per_node
    num_nodes = (server.first + size - 1) // plan.gpus_per_node - node + 1
    if num_nodes > 1:
        _check_nodes(server, size, num_nodes, plan)
    exchange, needs = _exchange(plan.engine, server, num_nodes)
    notes = (*_notes(flags, words, plan.spec), *needs)
    if num_nodes > 1 and plan.engine == "trtllm":
        launcher = ["srun", "-N", str(num_nodes), "-n", str(size), "--mpi=pmix", "trtllm-llmapi-launch"]
        yield _command(server, plan, flags, words, node, notes, launcher=launcher)
        return
    for index in range(num_nodes):
        across = (*exchange, *_across(plan.engine, index, num_nodes))
        yield _command(server, plan, flags, words, node + index, notes if index == 0 else (), across=across)


def _check_nodes(server: _Server, size: int, num_nodes: int, plan: _Plan) -> None:
    layout, first = server.layout, server.first
    if first % plan.gpus_per_node or size % num_nodes:
        raise LayoutError(say(
            "{layout} on GPUs {first} to {last} takes unequal parts of {n} nodes of {each}, and {engine} wants as many "
            "GPUs of each.", layout=layout, first=first, last=first + size - 1, n=num_nodes, each=plan.gpus_per_node,
            engine=ENGINE_NAMES[plan.engine],
        ))  # fmt: skip
    if plan.engine == "sglang" and layout.dp > 1 and not layout.attention_dp:
        raise LayoutError(say(
            "SGLang keeps its data-parallel replicas on one node, and {layout} spans {n}: start a server on each node "
            "and a router before them, or take attention data parallelism (ep over all ranks).", layout=layout,
            n=num_nodes,
        ))  # fmt: skip


def _command(
    server: _Server,
    plan: _Plan,
    flags: DeployFlags,
    words: SettingWords,
    node: int,
    notes: tuple[str, ...],
    *,
    across: tuple[str, ...] = (),
    launcher: list[str] | None = None,
) -> Command:
    transfer = transfer_words(plan.engine, server.role, server.kv_index) if plan.pools else None
    options = {**flags.options, **words.options, **(transfer.options if transfer else {})}
    environment = {**_visible(server, plan, flags), **flags.environment, **(transfer.environment if transfer else {})}
    model = [word for word in (_MODEL_WORD[plan.engine], plan.served) if word]
    rest = [*flags.flags, *words.flags, *(transfer.flags if transfer else ()), *across, "--port", str(server.port)]
    before = ""
    if options:
        file = f"{plan.engine}-{server.role}.yaml"
        before = file_text(file, yaml_text(options))
        rest += ["--config", file]
    text = before + command_text([*(launcher or []), *_PROGRAM[plan.engine], *model], rest, environment)
    return Command(plan.engine, VERSIONS[plan.engine], server.role, text, notes, node)


def _visible(server: _Server, plan: _Plan, flags: DeployFlags) -> dict[str, str]:
    """Which GPUs of its node a server may see, where it shares the node with others."""
    size = server.layout.world_size // flags.num_servers
    if size >= plan.gpus_per_node or not (plan.pools or flags.num_servers > 1):
        return {}
    first = server.first % plan.gpus_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + size)))}


def _across(engine: str, index: int, num_nodes: int) -> tuple[str, ...]:
    if num_nodes == 1:
        return ()
    if engine == "vllm":
        headless = ("--headless",) if index else ()
        return ("--nnodes", str(num_nodes), "--node-rank", str(index), "--master-addr", "FIRST_NODE", *headless)
    return ("--nnodes", str(num_nodes), "--node-rank", str(index), "--dist-init-addr", "FIRST_NODE:5000")


def _exchange(engine: str, server: _Server, num_nodes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """vLLM's words, and what they need, for experts that replicas on several nodes share: its default gathers every
    token everywhere, which the plan does not price between nodes (docs.vllm.ai, serving/expert_parallel_deployment)."""
    if engine != "vllm" or num_nodes == 1 or not server.layout.attention_dp:
        return (), ()
    backend = "deepep_high_throughput" if server.role == "prefill" else "deepep_low_latency"
    note = say("{backend} sends a token only to its experts' ranks, as the plan reckons; it needs DeepEP installed on "
               "each node.", backend=backend)  # fmt: skip
    return ("--all2all-backend", backend), (note,)


def _notes(flags: DeployFlags, words: SettingWords, spec: ModelSpec | None) -> tuple[str, ...]:
    mixture = flags.mixture_notes if spec is None or spec.moe is not None else ()
    return (*flags.notes, *mixture, *words.notes)


def _check_spec(engine: str, layout: Layout, spec: ModelSpec) -> None:
    """An engine's own limits that depend on the model, beyond what a layout's legality asks."""
    if engine == "vllm" and layout.dcp > 1 and layout.pcp == 1 and spec.mla is None:
        share = spec.num_heads // spec.num_kv_heads
        if share % layout.dcp:
            raise LayoutError(say(
                "vLLM wants the query heads of a KV head ({n} in {model}) to be a multiple of dcp, and {layout} has "
                "dcp {dcp}.", n=share, model=spec.name, layout=layout, dcp=layout.dcp,
            ))  # fmt: skip
