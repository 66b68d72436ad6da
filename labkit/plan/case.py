"""What is planned for, and what the cost model says of one layout: steps, prompts alone, TTFT and TPOT under load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from labkit.layout import Layout
from labkit.model.shapes import ModelSpec
from labkit.plan.cost import step_cost
from labkit.plan.demand import Demand
from labkit.plan.hardware import Hardware
from labkit.plan.objective import PlanObjective
from labkit.plan.predict import Prediction, predict_closed, predict_open
from labkit.plan.work import EngineSettings, StepCost, StepWork


@dataclass(frozen=True)
class Case:
    """What is planned for."""

    spec: ModelSpec
    hardware: Hardware
    demand: Demand
    objective: PlanObjective
    settings: EngineSettings = EngineSettings()
    engine: str = "vllm"
    price: float | None = None
    """$ per GPU and hour."""


def predict(case: Case, layout: Layout, settings: EngineSettings | None = None) -> Prediction:
    """At the mean lengths; TTFT's upper percentiles with the longer prefill that the p95 prompt has."""
    settings, demand = settings or case.settings, case.demand
    prompt = computed_prompt(demand, settings)
    if demand.rate is not None:
        found = predict_open(layout, case.spec, case.hardware, settings, prompt_tokens=prompt,
                             output_tokens=demand.output_tokens, rate=demand.rate, engine=case.engine)  # fmt: skip
    else:
        assert demand.concurrency is not None
        found = predict_closed(layout, case.spec, case.hardware, settings, prompt_tokens=prompt,
                               output_tokens=demand.output_tokens, concurrency=demand.concurrency,
                               engine=case.engine)  # fmt: skip
    if demand.long_prompt_tokens <= demand.prompt_tokens * 1.05:
        return found
    return _with_long_prompts(case, layout, settings, found, prompt)


def computed_prompt(demand: Demand, settings: EngineSettings) -> int:
    """Tokens of a mean prompt that are not found in the prefix cache."""
    return max(1, demand.prompt_tokens - (demand.shared_tokens if settings.enable_prefix_caching else 0))


def _with_long_prompts(
    case: Case, layout: Layout, settings: EngineSettings, found: Prediction, prompt: int
) -> Prediction:
    """The queue is everybody's; the prefill of a p95 prompt is longer than the mean one's by what it has more."""
    cost = cost_of_step(case, layout, settings)
    longest = max(prompt, case.demand.long_prompt_tokens - (case.demand.prompt_tokens - prompt))
    more_ms = 1e3 * (prefill_seconds(cost, longest, settings) - prefill_seconds(cost, prompt, settings))
    ttft = {name: value + (more_ms if name in ("p95", "p99") else 0.0) for name, value in found.ttft_ms.items()}
    return replace(found, ttft_ms=ttft)


def cost_of_step(case: Case, layout: Layout, settings: EngineSettings | None = None) -> StepCost:
    return step_cost(layout, case.spec, case.hardware, settings or case.settings, case.engine)


def prefill_seconds(cost: StepCost, tokens: int, settings: EngineSettings) -> float:
    """One prompt alone, in chunks of the step's budget."""
    total, done = 0.0, 0
    while done < tokens:
        chunk = min(settings.max_num_batched_tokens, tokens - done)
        total += cost.seconds(prefill_work(chunk, done, ends=done + chunk == tokens))
        done += chunk
    return total


def prefill_work(tokens: int, context: int = 0, ends: bool = True) -> StepWork:
    """A step that is one chunk of one prompt. Windows are taken as wide as the prompt."""
    pairs = tokens * context + tokens * (tokens + 1) // 2
    return StepWork(prefill_tokens=tokens, prefill_seqs=1, prefill_pairs=pairs, prefill_window_pairs=pairs,
                    prefill_context=context, logits=int(ends))  # fmt: skip


def decode_work(num_seqs: int, context_each: int) -> StepWork:
    total = num_seqs * context_each
    return StepWork(decodes=num_seqs, decode_context=total, decode_window_context=total, logits=num_seqs)
