"""What the planner says, in every language of the pages: no sentence of a plan is left in English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.layout import read_layout
from labkit.plan.objective import METRICS
from labkit.said import Said, bare_pattern
from labkit.show import i18n
from labkit.show.planner_inputs import Inputs, case_of
from labkit.show.planner_source import PlannerSource, look, plan_of

LABKIT = Path(__file__).parents[2] / "labkit"
OTHERS = [language for language in i18n.LANGUAGES if language != "en"]
LINKS = {"nvlink", "pcie", "xgmi", "network"}
"""Kinds of data/hardware, which are said by their names."""
ENGLISH = re.compile(r"[A-Za-z]{2,}(?: [a-z]{2,}){2,}")
"""Three words in a row: names and flags are fewer."""

CASES = {
    "one gpu": Inputs(model="llama-3.1-8b", num_gpus=2),
    "tensor parallel": Inputs(rate=2.0),
    "nothing does": Inputs(num_gpus=2, rate=40.0),
    "does not fit": Inputs(device="rtx4090", num_gpus=2, concurrency=8, load="concurrency"),
    "experts": Inputs(model="qwen3-235b-a22b-fp8", device="h100", rate=8.0, tpot_ms=30.0),
    "two nodes": Inputs(model="llama-3.1-405b", device="h100", num_gpus=16, nodes=2, rate=1.0, tpot_ms=150.0),
    "long prompts": Inputs(num_gpus=8, prompt_tokens=32768, rate=0.5, ttft_ms=2500.0),
    "a shared prefix": Inputs(model="llama-3.1-8b", workload="shared-prefix", num_gpus=4, rate=30.0),
    "latent attention": Inputs(model="deepseek-v3", num_gpus=8, prompt_tokens=8192, load="concurrency",
                               concurrency=32, ttft_ms=20_000.0, tpot_ms=200.0),
    "by sglang": Inputs(engine="sglang", rate=12.0, tpot_ms=25.0),
    "by tensorrt": Inputs(engine="trtllm", rate=12.0, kv_cache_dtype="fp8"),
}  # fmt: skip


def said_in_the_code() -> set[str]:
    """The pattern of every `say("…")`."""
    paths = [path for room in ("layout", "plan") for path in (LABKIT / room).rglob("*.py")]
    calls = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    patterns = (node.args[0] for node in calls if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "say")
    return {bare_pattern(each.value) for each in patterns if isinstance(each, ast.Constant)}


@pytest.mark.parametrize("language", OTHERS)
def test_every_sentence_has_a_translation_and_no_translation_is_left_over(language: str) -> None:
    said, known = said_in_the_code(), i18n.sentences(language).keys()
    assert len(said) > 150, "the search for sentences finds too few to mean anything"
    joins = {"{first} {then}", "{first}; {then}", "{first}, {then}"}
    assert said - known == set() and known - said == LINKS | joins


@pytest.mark.parametrize("language", OTHERS)
def test_a_translation_has_the_places_of_its_pattern(language: str) -> None:
    found = i18n.sentences(language)
    assert [each for each, text in found.items() if i18n.places(each) != i18n.places(text)] == []


@pytest.mark.parametrize("name", CASES)
def test_no_sentence_of_a_plan_is_left_in_english(name: str) -> None:
    plan = plan_of(CASES[name])
    cards = [card(CASES[name], layout) for layout in looked_at(plan)]
    told = [*sentences_of(plan), *(each for found in cards for each in sentences_of(found))]
    assert len(told) > 10
    left = {each for each in told if not isinstance(each, Said)}
    assert left == set()
    for language in OTHERS:
        shown = {translated(each, language) for each in told}
        assert {each for each in shown if ENGLISH.search(without_commands(each))} == set()


def looked_at(plan: dict[str, Any]) -> list[str]:
    """The answer, and one of each kind of layout that is refused."""
    kinds = {(one["fault"], one["fits"], len(one["layout"])): one["layout"] for one in plan["layouts"]}
    return list(kinds.values())[:8]


def card(inputs: Inputs, slug: str) -> dict[str, Any]:
    case = case_of(inputs)
    candidate = look(case, read_layout(slug))
    commands = PlannerSource()._commands(case, candidate, inputs) if candidate.legal else []
    return {"chosen": candidate.to_dict(), "commands": commands}


def sentences_of(plan: dict[str, Any]) -> Iterator[str]:
    """Whatever the page shows of it that is a sentence."""
    for step in plan.get("walk", []):
        yield from (step["question"], step["sentence"])
    for check in plan.get("checks", []):
        yield from (check["sentence"], *filter(None, [check["measure"]]))
        if check["name"] not in METRICS:
            yield check["name"]
    for one in [*plan.get("layouts", []), *filter(None, [plan["chosen"]])]:
        yield from filter(None, [one["reason"]])
        yield from [one["predictions"]["source"]] if one["predictions"] else []
    yield from plan.get("next", [])
    yield from [plan["infeasible"]["sentence"]] if plan.get("infeasible") else []
    for engine in plan["commands"]:
        yield from filter(None, [engine["refused"]])
        yield from (note for command in engine["commands"] for note in command["notes"])


def translated(told: str, language: str) -> str:
    """As web/sentence.js puts it together."""
    if not isinstance(told, Said):
        return told
    text = i18n.sentences(language).get(told.pattern, told.pattern)
    return re.sub(r"\{(\w+)\}", lambda place: translated(told.values[place[1]], language), text)


def without_commands(text: str) -> str:
    """What one types stays as it is typed."""
    return re.sub(r"labkit run [ -~]*|pip install [ -~]*", "", text)
