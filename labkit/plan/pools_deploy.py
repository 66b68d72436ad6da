"""Pools with roles on other engines: how a server learns its role, what carries KV between, which router asks them.

vLLM moves KV with NixlConnector and is asked through vllm-router; SGLang has roles of its own and sglang-router;
TensorRT-LLM is asked through `trtllm-serve disaggregated`. None of the three sends long prompts to a pool of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.layout import Deployment, LayoutError
from labkit.model.shapes import ModelSpec
from labkit.plan.command_text import command_text, file_text, yaml_text
from labkit.plan.engine_flags import ENGINE_NAMES
from labkit.said import say

POOL_PORT = 8100
"""Of the first pool's server; the others follow."""
_SIDE_CHANNEL = 5600
_BOOTSTRAP = 8998
_HOST = "http://127.0.0.1"


@dataclass(frozen=True)
class Transfer:
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def check_pools(engine: str, deployment: Deployment, spec: ModelSpec | None) -> None:
    """Raises LayoutError for pools that the engine cannot join."""
    roles = [pool.role for pool in deployment.pools]
    if set(roles) != {"prefill", "decode"}:
        raise LayoutError(say(
            "{engine} joins pools of prefill and decode only, and {layout} has {roles}: start a server for each pool "
            "and send long prompts to theirs at your own gateway.", engine=ENGINE_NAMES[engine], layout=deployment,
            roles=", ".join(roles),
        ))  # fmt: skip
    if engine == "vllm":
        _check_vllm(deployment, spec)


def _check_vllm(deployment: Deployment, spec: ModelSpec | None) -> None:
    for _, layout, _ in deployment.pools:
        if layout.dcp == 1:
            continue
        if spec is not None and spec.mla is None:
            raise LayoutError(say(
                "vLLM hands KV over from pools with dcp for latent attention (MLA) only, and {model} has none: leave "
                "dcp out of {layout}.", model=spec.name, layout=layout,
            ))  # fmt: skip
        if layout.dcp != max(layout.tp, layout.pcp):
            raise LayoutError(say(
                "vLLM's NixlConnector wants dcp to be 1 or the larger of tp and pcp, and {layout} has dcp {dcp}.",
                layout=layout, dcp=layout.dcp,
            ))  # fmt: skip


def transfer_words(engine: str, role: str, index: int) -> Transfer:
    """What a pool's server is given beside its layout. `index` keeps the ports of several apart."""
    if engine == "vllm":
        kv = {"kv_connector": "NixlConnector", "kv_role": "kv_producer" if role == "prefill" else "kv_consumer"}
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(_SIDE_CHANNEL + index)}
        return Transfer(("--kv-transfer-config", json.dumps(kv, separators=(",", ":"))), environment)
    if engine == "sglang":
        flags = ("--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl")
        port = ("--disaggregation-bootstrap-port", str(_BOOTSTRAP + index)) if role == "prefill" else ()
        return Transfer((*flags, *port))
    options: dict[str, Any] = {"cache_transceiver_config": {"backend": "NIXL"}}
    if role == "prefill":
        options["disable_overlap_scheduler"] = True
    return Transfer(options=options)


def router(engine: str, servers: Sequence[tuple[str, int]], port: int) -> tuple[str, tuple[str, ...]]:
    """Text and notes. servers: (role, port) of each, prefill pools in the order in which they were started."""
    prefill = [at for role, at in servers if role == "prefill"]
    decode = [at for role, at in servers if role == "decode"]
    if engine == "trtllm":
        return _trtllm_router(prefill, decode, port)
    if engine == "vllm":
        first, note = ["vllm-router"], _install("vllm-router 0.1.17")
        words = ["--vllm-pd-disaggregation"]
        for at in prefill:
            words += ["--prefill", f"{_HOST}:{at}"]
    else:
        first, note = ["python", "-m", "sglang_router.launch_router"], _install("sglang-router 0.3.2")
        words = ["--pd-disaggregation"]
        for number, at in enumerate(prefill):
            words += ["--prefill", f"{_HOST}:{at}", str(_BOOTSTRAP + number)]
    for at in decode:
        words += ["--decode", f"{_HOST}:{at}"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    return command_text(first, words), (note,)


def _install(package: str) -> str:
    name, version = package.split()
    return say("pip install {package} nixl ({version} when this was written). Servers on other machines: their "
               "addresses.", package=name, version=version)  # fmt: skip


def _trtllm_router(prefill: Sequence[int], decode: Sequence[int], port: int) -> tuple[str, tuple[str, ...]]:
    def pool(ports: Sequence[int]) -> dict[str, Any]:
        return {"num_instances": len(ports), "urls": [f"127.0.0.1:{at}" for at in ports]}

    config = {"hostname": "127.0.0.1", "port": port, "backend": "pytorch",
              "context_servers": pool(prefill), "generation_servers": pool(decode)}  # fmt: skip
    text = file_text("trtllm-router.yaml", yaml_text(config))
    note = say("cache_transceiver_config takes max_tokens_in_buffer, too: at least the longest prompt is advised.")
    return text + command_text(["trtllm-serve", "disaggregated"], ["-c", "trtllm-router.yaml"]), (note,)
