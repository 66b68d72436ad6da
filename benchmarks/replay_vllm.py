"""Recorded runs of real vLLM, replayed: TTFT and TPOT beside what was measured, three times over.

`as planned`: datasheet and the constants fitted on other GPUs' servings (data/fitted), nothing of these runs.
`left out`: every step times one factor, fitted so that TPOT's mean comes out on the *other* runs, never on this one.
`schedule`: the same factor fitted on this very run, which says nothing of the cost, and how far the schedule alone is
off: TPOT's mean is given, TTFT and the tails are not. The runs are not part of the project; they are found beside it.

    python benchmarks/replay_vllm.py [--write] [--json]

--write keeps the factors in data/fitted/recorded.toml, where `labkit replay` finds those of the other GPUs' runs: do it
whenever data/fitted/engines.toml has changed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.model.spec import load_spec
from labkit.plan import replay
from labkit.plan.cost import step_cost
from labkit.plan.hardware import load_hardware
from labkit.plan.recorded import GRAPHICS, Times, recorded_file

SHARED = Path(os.environ.get("LABKIT_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data")
RUNS = SHARED / "measured" / "requests"
PAGE = Path(__file__).parents[1] / "docs" / "predictions_replay.md"
LIMIT = 0.10
FIGURES = [(metric, key) for metric in ("ttft_ms", "tpot_ms") for key in ("mean", "p99")]


class Recorded:
    def __init__(self, requests: Path) -> None:
        self.name = requests.name.removesuffix(".requests.jsonl")
        meta = requests.with_name(f"{self.name}.meta.json")
        self.rows = replay.read_rows(requests)
        self.setup = replay.read_setup(json.loads(meta.read_text()), meta.name)
        self.gpus = f"{self.setup.layout.world_size}x{self.setup.gpus}"
        spec = load_spec(replay.model_name(self.setup.model))
        self.cost = step_cost(
            self.setup.layout, spec, load_hardware(self.gpus), self.setup.settings, version=self.setup.version
        )
        self.blocks = replay.planned_blocks(self.setup, spec, self.gpus)
        self.real = replay.measured(self.rows)

    def predict(self, factor: float = 1.0) -> dict[str, dict[str, float]]:
        return replay.predicted(replay.replay(self.rows, self.setup, Times(self.cost, factor), self.blocks))

    def fitted_factor(self, rounds: int = 6) -> float:
        """At which TPOT's mean is the run's: it nearly follows the step, so a few rounds of the rule of three."""
        factor = 1.0
        for _ in range(rounds):
            factor *= self.real["tpot_ms"]["mean"] / self.predict(factor)["tpot_ms"]["mean"]
        return factor


def errors(run: Recorded, factor: float) -> dict[str, float]:
    guess = run.predict(factor)
    return {f"{metric} {key}": guess[metric][key] / run.real[metric][key] - 1 for metric, key in FIGURES}


def table(runs: Sequence[Recorded]) -> dict[str, Any]:
    own = {run.name: run.fitted_factor() for run in runs}
    told: dict[str, Any] = {}
    print(f"{'':<44}{'':>11}  {'factor':>6}" + "".join(f"{metric[:4]} {key}".rjust(12) for metric, key in FIGURES))
    for run in runs:
        print(f"{run.name:<44}{'measured':>11}  {'':>6}" + "".join(f"{run.real[m][k]:12,.1f}" for m, k in FIGURES))
        others = [factor for name, factor in own.items() if name != run.name]
        kinds = {"as planned": 1.0, "left out": sum(others) / len(others) if others else 1.0, "schedule": own[run.name]}
        for kind, factor in kinds.items():
            found = errors(run, factor)
            told[f"{run.name} {kind}"] = {"factor": factor, **found}
            within = all(abs(error) <= LIMIT for error in found.values())
            cells = "".join(f"{error:+12.1%}" for error in found.values())
            print(f"{'':<44}{kind:>11}  {factor:6.3f}{cells}  {'within' if within else 'NOT within'} {LIMIT:.0%}")
    return told


def fitted_text(runs: Sequence[Recorded], told: dict[str, Any]) -> str:
    """The factors as TOML; the residual is the mean absolute error of the four figures with the factor."""
    lines = [
        "# Written by benchmarks/replay_vllm.py: how steps of GPUs with graphics memory differ from the cost model",
        "# (no serving behind engines.toml had one). `labkit replay` takes the factors of other GPUs' runs alone.",
    ]
    for run in runs:
        found = told[f"{run.name} schedule"]
        if run.setup.gpus in GRAPHICS:
            residual = sum(abs(error) for name, error in found.items() if name != "factor") / len(FIGURES)
            lines += [
                f"\n[{run.setup.gpus}]",
                f'factor = {{ value = {found["factor"]:.4f}, unit = "1", origin = "fitted", '
                f'source = "{run.name}, vLLM, 300 requests (LLMServingSim, MIT)", residual = {residual:.3f} }}',
            ]
    return "\n".join(lines) + "\n"


def page(runs: Sequence[Recorded], told: dict[str, Any]) -> str:
    """docs/predictions_replay.md, a row for each run and way."""
    heads = " | ".join(f"{metric.removesuffix('_ms').upper()} {key}" for metric, key in FIGURES)
    lines = [
        "# Recorded runs of vLLM, replayed",
        "",
        "Written by `benchmarks/replay_vllm.py --write`; its docstring says what the three ways are. Measured in ms,",
        "predictions as signed errors.",
        "",
        f"| run | | factor | {heads} |",
        "|---|---|---|" + "---|" * len(FIGURES),
    ]
    for run in runs:
        lines.append(f"| {run.name} | measured | | " + " | ".join(f"{run.real[m][k]:,.1f}" for m, k in FIGURES) + " |")
        for kind in ("as planned", "left out", "schedule"):
            found = told[f"{run.name} {kind}"]
            cells = " | ".join(f"{found[f'{m} {k}']:+.1%}" for m, k in FIGURES)
            lines.append(f"| | {kind} | {found['factor']:.3f} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the factors and the page in docs")
    parser.add_argument("--json", action="store_true", help="a JSON line last")
    options = parser.parse_args()
    files = sorted(RUNS.glob("*.requests.jsonl"))
    if not files:
        print(f"No recorded runs at {RUNS}: set LABKIT_SHARED_DATA to the folder that has measured/requests.")
        return
    runs = [Recorded(file) for file in files]
    told = table(runs)
    if options.write:
        recorded_file().write_text(fitted_text(runs, told))
        PAGE.write_text(page(runs, told))
    if options.json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
