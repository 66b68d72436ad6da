"""How a lab server is started: what may be said, what is assumed, and the sentence when the two do not fit.

Everything that can be refused is refused here, before a port listens or a rank starts.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.cluster.topology import Machine, default_num_ranks, default_threads, look_at_machine
from labkit.engine.settings import EngineSettings
from labkit.engine.watchdog import STEP_TIMEOUT_S
from labkit.layout import AnyLayout, read_layout, require_deployable
from labkit.model.spec import ModelSpec, list_models, load_spec, model_dir
from labkit.model.tokenizer import load_tokenizer
from labkit.server.app import is_loopback
from labkit.server.lifetime import DEFAULT_LINGER_S
from labkit.server.placing import Placing, place
from labkit.server.service import ServedModel
from labkit.server.sizes import parse_bytes

DEFAULT_MODEL = "lab-30m"


@dataclass(frozen=True)
class ServeOptions:
    """As given on the command line; zero and empty mean: choose what suits the machine."""

    model: str = DEFAULT_MODEL
    layout: str = "tp1"
    ranks: int = 0
    threads: int = 0
    device: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    allow_hosts: tuple[str, ...] = ()
    memory_per_rank: str = "0"
    fabric: str = ""
    dtype: str = ""
    router: str = "least-work"
    admission: str = "labkit"
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    block_size: int = 16
    max_model_len: int = 0
    prefix_cache: bool = True
    record: bool = True
    graphs: bool | None = None
    """None: on GPUs, where a decode step is launched as one graph."""
    seed: int = 0
    step_timeout: float = STEP_TIMEOUT_S
    nodes: int = 0
    ranks_per_node: int = 0
    link: str = ""
    link_delay_ms: float = 0.0
    join_ranks: int = 0
    control_host: str = "0.0.0.0"
    control_port: int = 0
    control_token_file: str = ""


@dataclass(frozen=True)
class ServePlan:
    """The checked options."""

    model: ServedModel
    settings: EngineSettings
    num_ranks: int
    threads: int
    device: str
    backend: str
    host: str
    port: int
    token: str
    allowed_hosts: frozenset[str]
    linger_s: float
    step_timeout_s: float
    placing: Placing = Placing()


def make_plan(options: ServeOptions) -> ServePlan:
    """Raises ValueError (or FileNotFoundError for the model) with a sentence."""
    machine = look_at_machine()
    device = options.device or machine.backend
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device is {device!r}; it can be cpu or cuda.")
    folder = model_dir(options.model)
    spec = load_spec(options.model)
    layout = read_layout(options.layout)
    placing = place(options, machine)
    num_ranks = _num_ranks(options, placing) or max(layout.world_size, default_num_ranks(machine))
    _check_gpus(device, num_ranks, machine)
    require_deployable(layout, spec, num_ranks, engine=True)
    return ServePlan(
        model=_served_model(options, folder, spec),
        settings=_settings(options, layout, device),
        num_ranks=num_ranks,
        threads=options.threads or default_threads(machine.num_cores, num_ranks),
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
        host=options.host,
        port=_port(options.port),
        token=_token(options.host),
        allowed_hosts=frozenset(name.lower() for name in (*options.allow_hosts, options.host)),
        linger_s=_linger_s(),
        step_timeout_s=_step_timeout_s(options.step_timeout),
        placing=placing,
    )


def _check_gpus(device: str, num_ranks: int, machine: Machine) -> None:
    """NCCL would refuse two ranks on one GPU, after half a minute and in its own words."""
    if device == "cuda" and machine.gpus and num_ranks > len(machine.gpus):
        raise ValueError(
            f"{num_ranks} ranks need {num_ranks} GPUs, one each, and this machine has {len(machine.gpus)}: take "
            f"--ranks {len(machine.gpus)} and a layout that fits, or --device cpu."
        )


def _num_ranks(options: ServeOptions, placing: Placing) -> int:
    return placing.nodes.num_ranks if placing.nodes else options.join_ranks or options.ranks


def _served_model(options: ServeOptions, folder: Path, spec: ModelSpec) -> ServedModel:
    longest = spec.max_positions
    if options.max_model_len > longest:
        raise ValueError(f"--max-model-len is {options.max_model_len}; {spec.name} has positions for {longest}.")
    name = options.model if options.model in list_models() else folder.name
    tokenizer = load_tokenizer(folder, spec.vocab_size)
    return ServedModel(name, folder, spec, tokenizer, options.max_model_len or longest)


def _settings(options: ServeOptions, layout: AnyLayout, device: str) -> EngineSettings:
    on_gpu = device == "cuda"
    same: dict[str, Any] = {
        name: getattr(options, name)
        for name in (
            "router", "admission", "prefix_cache", "max_num_batched_tokens", "max_num_seqs", "block_size",
            "record", "seed",
        )
    }  # fmt: skip
    return EngineSettings(
        layout=layout,
        memory_per_rank=parse_bytes(options.memory_per_rank),
        fabric=options.fabric or ("nccl" if on_gpu else "shm"),
        dtype=options.dtype or ("bfloat16" if on_gpu else "float32"),
        graphs=on_gpu if options.graphs is None else options.graphs,
        **same,
    )


def _port(port: int) -> int:
    if not 0 <= port <= 65535:
        raise ValueError(f"--port is {port}; it can be 0 (any free one) to 65535.")
    return port


def _token(host: str) -> str:
    """LABKIT_TOKEN, else a new one; a server that others can reach must be given one on purpose."""
    given = os.environ.get("LABKIT_TOKEN", "")
    if not given and not is_loopback(host):
        raise ValueError(
            f"--host {host} lets other machines in, so the token must be yours: set LABKIT_TOKEN to a secret "
            f"(and put TLS in front), or leave --host away to serve this machine only."
        )
    return given or secrets.token_urlsafe(24)


def _step_timeout_s(seconds: float) -> float:
    if not seconds > 0:
        raise ValueError(f"--step-timeout is {seconds:g}; it is a number of seconds above 0.")
    return seconds


def _linger_s() -> float:
    text = os.environ.get("LABKIT_LINGER_S", "")
    try:
        return float(text) if text else DEFAULT_LINGER_S
    except ValueError as error:
        raise ValueError(f"LABKIT_LINGER_S is {text!r}; it is a number of seconds (0: stay for ever).") from error
