"""Lesson 08: your own model and your own server. A config.json becomes memory, and memory a verdict; a server that was
measured from outside becomes traffic and a diagnosis; both together become a plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.lab import Run
from labkit.lab.lab import run_against
from labkit.layout import Layout, kv_bytes_per_token
from labkit.layout.choices import candidate_layouts, simplicity
from labkit.layout.legality import reasons_against
from labkit.model.spec import ModelSpec, load_spec
from labkit.paths import home_dir
from labkit.plan.advise import Advice, advise
from labkit.plan.demand import Demand
from labkit.plan.diagnose import Diagnosis
from labkit.plan.hardware import Hardware, load_hardware
from labkit.plan.memory import MemoryPlan, memory_plan
from labkit.plan.objective import PlanObjective
from labkit.plan.stored import PlannedFrom
from labkit.plan.work import EngineSettings
from labkit.server.client import ServerError
from labkit.teach.html import Table
from labkit.teach.lesson import Lesson
from labkit.teach.own_exercises import check_kv_of, check_verdict_of, kv_of, verdict_of

__all__ = ["check_kv_of", "check_verdict_of", "kv_of", "verdict_of"]

GB = 1e9
EXAMPLE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 20480,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""A model that nobody has published: what stands for the reader's own until there is one."""
GPUS, WORKLOAD = "4xl40s", "chat"
REAL = 10
"""The lab's chats are a tenth as long as those of production (data/workloads/chat.toml)."""


# ---- a config.json


def write_config(name: str = "own-model", **changes: Any) -> Path:
    """The example's config.json with `changes` (None takes a key out), in labkit's own folder; its path."""
    folder = home_dir() / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in {**EXAMPLE, **changes}.items() if value is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return path


def own_model(config: str | Path | None) -> ModelSpec:
    """The reader's model; the example where none is given. Raises ConfigError or FileNotFoundError."""
    return load_spec(str(config or write_config()))


def own_gpus(gpus: str | None) -> Hardware:
    return load_hardware(gpus or GPUS)


def config_table(spec: ModelSpec) -> Table:
    """What of a config.json decides about memory."""
    layers = f"{spec.num_layers} layers, hidden size {spec.hidden_size:,}"
    heads = f"{spec.num_heads} query heads, {spec.num_kv_heads} KV heads of {spec.head_dim}"
    rows = [["shape", layers], ["heads", f"latent attention, {heads}" if spec.mla else heads],
            ["MLP", f"{spec.intermediate_size:,} columns"]]  # fmt: skip
    if spec.moe:
        rows.append(["experts", f"{spec.moe.num_experts}, of which a token gets {spec.moe.top_k}"])
    rows += [["parameters", f"{spec.num_parameters / 1e9:.2f} billion"], ["kept in", f"{spec.dtype}"]]
    return Table(f"{spec.name}, by its config.json", ["", ""], rows)


def kv_bytes(spec: ModelSpec, tp: int = 1) -> int:
    """Of one token on rank 0, as the weights compute."""
    return kv_bytes_per_token(Layout(tp=tp), spec, 0, spec.dtype_bytes)


def weights_gb(spec: ModelSpec, slug: str = "tp1") -> float:
    """Of the fullest rank."""
    plan = memory_plan(Layout.parse(slug), spec, 1 << 50, EngineSettings())
    return max(rank.weight_bytes for rank in plan.ranks) / GB


def ranks_table(spec: ModelSpec, hardware: Hardware, num_requests: int, tokens_each: int) -> Table:
    """Every layout of dp, pp and tp on these GPUs: what a rank holds, what is left, and the verdict."""
    rows = []
    for layout in sorted(candidate_layouts(hardware.num_gpus), key=simplicity):
        if layout.dp * layout.pp * layout.tp != layout.world_size or layout.dcp > 1 or layout.ep > 1:
            continue
        if reasons := reasons_against(layout, spec, hardware.num_gpus):
            rows.append([str(layout), "–", "–", "–", "refused", reasons[0]])
            continue
        plan = memory_plan(layout, spec, hardware.device.memory_bytes, EngineSettings())
        rows.append(_held(plan, num_requests, tokens_each))
    columns = ["layout", "weights of a rank", "beside them", "KV tokens of a replica", "verdict", "because"]
    title = f"{spec.name} on {hardware.name}: {num_requests} requests of {tokens_each:,} tokens"
    return Table(title, columns, rows, ["Predicted, for vLLM with its usual settings."])


def _held(plan: MemoryPlan, num_requests: int, tokens_each: int) -> list[str]:
    fullest = max(plan.ranks, key=lambda rank: rank.weight_bytes)
    verdict = plan.verdict(num_requests, tokens_each)
    sizes = [f"{size / GB:.1f} GB" for size in (fullest.weight_bytes, fullest.beside)]
    return [str(plan.layout), *sizes, f"{plan.kv_tokens:,}", verdict.answer, str(verdict)]


def fewest_gpus(spec: ModelSpec, hardware: Hardware, num_requests: int, tokens_each: int) -> int | None:
    """Of any legal layout that holds so many requests at once; None where none of these GPUs do."""
    held = [
        layout.world_size
        for layout in candidate_layouts(hardware.num_gpus)
        if not reasons_against(layout, spec, hardware.num_gpus)
        and memory_plan(layout, spec, hardware.device.memory_bytes, EngineSettings())
        .verdict(num_requests, tokens_each).answer == "fits"
    ]  # fmt: skip
    return min(held, default=None)


def must_fit(spec: ModelSpec, slug: str) -> None:
    """Raises ValueError with the model's reasons where it does not allow the layout."""
    if reasons := reasons_against(Layout.parse(slug), spec):
        raise ValueError(f"{spec.name}: {' '.join(reasons)}")


# ---- a server


def set_up(lesson: Lesson, layout: str, room: int, **settings: Any) -> None:
    """The lab's server with KV for `room` tokens and no more: somebody was in a hurry. Nothing is told of it."""
    lesson.switch(layout, **{**settings, "memory_per_rank": 3 * lesson.case.budget_bytes})
    weights = max(int(rank["weights"]) for rank in lesson.lab.state()["memory"] if rank["weights"])
    tokens = room + lesson.case.settings()["block_size"]
    budget = weights + tokens * lesson.case.kv_bytes_per_token(layout)
    lesson.switch(layout, **{**settings, "memory_per_rank": budget})


def target(lesson: Lesson, url: str | None = None, model: str = "", token: str = "") -> dict[str, Any]:
    """The reader's server; the lab's own, asked as if it were not, where none is given."""
    if url:
        return {"url": url, "model": model, "token": token}
    return {"url": lesson.lab.url, "model": "", "token": lesson.lab.client.token or ""}


def ask(lesson: Lesson, server: Mapping[str, Any], label: str, workload: str = WORKLOAD, **load: Any) -> Run:
    """What `labkit run --server` does: any OpenAI-compatible server, the same client, the same figures.

    Raises ServerError when it fails or cannot be measured.
    """
    try:
        run = run_against(workload=workload, **server, **load)
    except RuntimeError as error:
        raise ServerError(str(error)) from error
    if run.status == "failed":
        raise ServerError(f"The run failed: {run.summary.get('error')}")
    lesson.runs.append((label, run))
    return run


def traffic_of(run: Run) -> Demand:
    """The lengths and the load that a stored run had."""
    return PlannedFrom.load(run.run_id).demand()


def at_scale(demand: Demand, lengths: float, load: float) -> Demand:
    """The same traffic with every length times `lengths` and the load times `load`."""
    def times(tokens: int) -> int:
        return max(1, round(tokens * lengths))

    now = demand.rate or demand.concurrency or 0
    longer = replace(
        demand, prompt_tokens=times(demand.prompt_tokens), output_tokens=times(demand.output_tokens),
        long_prompt_tokens=times(demand.long_prompt_tokens), longest_tokens=times(demand.longest_tokens),
        shared_tokens=round(demand.shared_tokens * lengths),
        lengths=tuple((times(prompt), times(answer)) for prompt, answer in demand.lengths),
    )  # fmt: skip
    return longer.at_load(now * load)


def traffic_table(demands: Mapping[str, Demand]) -> Table:
    rows = [
        [label, f"{one.prompt_tokens:,}", f"{one.long_prompt_tokens:,}", f"{one.output_tokens:,}", one.load]
        for label, one in demands.items()
    ]
    return Table("Traffic", ["", "prompt tokens", "p95", "answer tokens", "load"], rows, ["Means but for the p95."])


def plan_own(spec: ModelSpec, hardware: Hardware, demand: Demand, objective: PlanObjective) -> Advice:
    """`labkit plan` for it, with nothing serving yet."""
    return advise(spec, hardware, demand, objective, asked=f"{demand.prompt_tokens}/{demand.output_tokens}")


def plan_here(lesson: Lesson, run: Run, objective: PlanObjective, diagnosis: Diagnosis) -> Advice:
    """For the machine at hand, from a run on it. Raises ValueError with what to do where it is not calibrated."""
    stored = PlannedFrom.load(run.run_id)
    return advise(
        lesson.case.spec, load_hardware("here"), stored.demand(), objective, stored.settings(), engine="labkit",
        current=stored.layout(), diagnosis=diagnosis,
    )  # fmt: skip


def begins_with(advice: Advice) -> str:
    """Where the walk begins: what serves now, or the smallest layout that holds the model."""
    return next((question.layout for question in advice.walk if question.code == "limit"), "none")


class Commands:
    """Text to paste, each with its role and its notes."""

    def __init__(self, advice: Advice, engine: str) -> None:
        self.entry = next((one for one in advice.commands if one["engine"] == engine), None)
        self.engine = engine

    def __repr__(self) -> str:
        if self.entry is None:
            return f"Nothing was chosen, so there is no command for {self.engine}."
        if self.entry["refused"]:
            return str(self.entry["refused"])
        lines = [f"{self.entry['name']} {self.entry['version']}"]
        for command in self.entry["commands"]:
            lines += [f"# {command['role']}", command["text"], *(f"#   {note}" for note in command["notes"])]
        return "\n".join(lines)
