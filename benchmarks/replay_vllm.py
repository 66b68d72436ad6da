"""Recorded runs of real vLLM, replayed: TTFT and TPOT beside what was measured, twice over.

`as planned`: datasheets, published sweeps and the constants fitted on Hopper's servings (data/fitted), nothing of any
recorded run. `schedule`: every step times one factor, fitted on this very run so that TPOT's mean comes out, which says
nothing of the cost, and how far the schedule alone is off: TPOT's mean is given, TTFT and the tails are not. The runs
are not part of the project; they are found beside it.

    python benchmarks/replay_vllm.py [--write] [--json]

--write keeps the page in docs: do it whenever data/fitted/engines.toml or data/hardware has changed.
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
from labkit.plan.work import StepCost, StepWork

SHARED = Path(os.environ.get("LABKIT_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data")
RUNS = SHARED / "measured" / "requests"
PAGE = Path(__file__).parents[1] / "docs" / "predictions_replay.md"
LIMIT = 0.10
FIGURES = [(metric, key) for metric in ("ttft_ms", "tpot_ms") for key in ("mean", "p99")]
KINDS = ("as planned", "schedule")


class Times:
    """A cost whose steps take `factor` times as long."""

    def __init__(self, cost: StepCost, factor: float) -> None:
        self._cost, self.factor = cost, factor

    def seconds(self, work: StepWork) -> float:
        return self.factor * self._cost.seconds(work)

    def interval(self, work: StepWork) -> float:
        return self.factor * self._cost.interval(work)

    def parts(self, work: StepWork) -> dict[str, float]:
        return {part: self.factor * seconds for part, seconds in self._cost.parts(work).items()}

    def shared_rows(self, rows: Sequence[float]) -> float:
        return self._cost.shared_rows(rows)

    def handoff_seconds(self, num_tokens: int) -> float:
        return self._cost.handoff_seconds(num_tokens)


class Recorded:
    def __init__(self, requests: Path) -> None:
        self.name = requests.name.removesuffix(".requests.jsonl")
        meta = requests.with_name(f"{self.name}.meta.json")
        self.rows = replay.read_rows(requests)
        self.setup = replay.read_setup(json.loads(meta.read_text()), meta.name)
        spec = load_spec(replay.model_name(self.setup.model))
        self.cost = step_cost(
            self.setup.layout, spec, load_hardware(self.setup.gpus), self.setup.settings, version=self.setup.version
        )
        self.blocks = replay.planned_blocks(self.setup, spec)
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
    told: dict[str, Any] = {}
    print(f"{'':<44}{'':>11}  {'factor':>6}" + "".join(f"{metric[:4]} {key}".rjust(12) for metric, key in FIGURES))
    for run in runs:
        print(f"{run.name:<44}{'measured':>11}  {'':>6}" + "".join(f"{run.real[m][k]:12,.1f}" for m, k in FIGURES))
        for kind, factor in zip(KINDS, (1.0, run.fitted_factor()), strict=True):
            found = errors(run, factor)
            told[f"{run.name} {kind}"] = {"factor": factor, **found}
            within = all(abs(error) <= LIMIT for error in found.values())
            cells = "".join(f"{error:+12.1%}" for error in found.values())
            print(f"{'':<44}{kind:>11}  {factor:6.3f}{cells}  {'within' if within else 'NOT within'} {LIMIT:.0%}")
    return told


NOTE = """\
A request's TTFT in these runs is mostly its wait for a slot or for KV, so it is the difference of two long times:
when others end, and when it came. An error of one percent in the speed of all steps is several in TTFT: `schedule`
beside `as planned` shows how many. The instants at which requests begin and end tell the real steps one by one. In
the run with experts they jump by 2 ms near 64 and near 128 rows of both replicas together, as where a kernel or a
protocol of the collectives gives way to another; the plan, which has no such jumps, agrees below them and is short
above. Rows that a graph pads are counted, to its captured size and of both replicas to the larger."""


def page(runs: Sequence[Recorded], told: dict[str, Any]) -> str:
    """docs/predictions_replay.md, a row for each run and way."""
    heads = " | ".join(f"{metric.removesuffix('_ms').upper()} {key}" for metric, key in FIGURES)
    lines = [
        "# Recorded runs of vLLM, replayed",
        "",
        "Written by `benchmarks/replay_vllm.py --write`; its docstring says what the two ways are. Measured in ms,",
        "predictions as signed errors.",
        "",
        f"| run | | factor | {heads} |",
        "|---|---|---|" + "---|" * len(FIGURES),
    ]
    for run in runs:
        lines.append(f"| {run.name} | measured | | " + " | ".join(f"{run.real[m][k]:,.1f}" for m, k in FIGURES) + " |")
        for kind in KINDS:
            found = told[f"{run.name} {kind}"]
            cells = " | ".join(f"{found[f'{m} {k}']:+.1%}" for m, k in FIGURES)
            lines.append(f"| | {kind} | {found['factor']:.3f} | {cells} |")
    return "\n".join([*lines, "", NOTE]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the page in docs")
    parser.add_argument("--json", action="store_true", help="a JSON line last")
    options = parser.parse_args()
    files = sorted(RUNS.glob("*.requests.jsonl"))
    if not files:
        print(f"No recorded runs at {RUNS}: set LABKIT_SHARED_DATA to the folder that has measured/requests.")
        return
    runs = [Recorded(file) for file in files]
    told = table(runs)
    if options.write:
        PAGE.write_text(page(runs, told))
    if options.json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
