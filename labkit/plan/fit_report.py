"""From a fit of measured servings to data/fitted/engines.toml: bases, factors, and the bands of what it predicts.

    python -m labkit.plan.fit_report ../shared/data

The shipped constants are fitted on all rows; their residual is the mean absolute relative error of the fit on the rows
that they touch. The bands are errors with the model left out, of one engine and kind of model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from labkit.plan.engine_cost import fitted_file
from labkit.plan.fit_serving import Fitter, Sample
from labkit.plan.measured_rows import Row
from labkit.plan.row_rules import load_rows

SOURCE = "measured/serving_hopper.csv (InferenceX rows of aiconfigurator, Apache-2.0), labkit/plan/fit_serving.py"


def kind_of(row: Row) -> str:
    return "latent" if row.spec.mla else "experts" if row.spec.moe else "dense"


def relative(found: Any, measured: Iterable[float]) -> Any:
    """Signed errors, as a share of what was measured."""
    return found / np.array(list(measured)) - 1


def engines_toml(fitter: Fitter, x: Any, left_out: tuple[Any, Any]) -> str:
    """The whole file."""
    loop, samples = fitter.predict(fitter.constants(x)), fitter.samples
    tpot = np.abs(relative(loop.tpot_s, (s.tpot_s for s in samples)))
    ttft = np.abs(relative(loop.ttft_s, (s.ttft_s for s in samples)))
    host = ("request_s", "request_token_s", "queue_share", "prefill_")
    lines = [
        "# Written by `python -m labkit.plan.fit_report`; run it again rather than edit this.",
        "# A constant is its base times the factor of each class of the row; a class without one has 1.", "",
        "[sources]", f'fit = "{SOURCE}"', "", "[base]",
    ]  # fmt: skip
    factors: dict[tuple[str, str], list[str]] = {}
    for (name, kind, value), log_value, member in zip(fitter.keys, x, fitter.member, strict=True):
        error = float(((ttft if name.startswith(host) else tpot) * member).sum() / member.sum())
        if not kind:
            unit = "s" if name.endswith("_s") else "1"
            given = f'value = {np.exp(log_value):.5g}, unit = "{unit}", origin = "fitted", source = "fit"'
            lines.append(f"{name} = {{ {given}, residual = {error:.3f} }}")
        elif abs(log_value) > 5e-4:
            factors.setdefault((kind, value), []).append(f"{name} = {np.exp(log_value):.4f}")
    for (kind, value), each in sorted(factors.items()):
        lines += ["", f'[factors.{kind}."{value}"]', *each]
    return "\n".join([*lines, *_bands(samples, *left_out)]) + "\n"


def _bands(samples: Iterable[Sample], ttft: Any, tpot: Any) -> list[str]:
    samples = list(samples)
    ttft_error = np.abs(relative(ttft, (s.ttft_s for s in samples)))
    tpot_error = np.abs(relative(tpot, (s.tpot_s for s in samples)))
    names = [("all", row.engine, f"{row.engine} {kind_of(row)}") for row in (s.row for s in samples)]
    gpus = sorted({s.row.hardware.device.name for s in samples})
    lines = ["", "[bands] # mean absolute relative errors, the model left out", f"gpus = {gpus!r}".replace("'", '"')]
    for name in sorted({each for three in names for each in three}):
        mine = np.array([name in three for three in names])
        counted = mine & np.array([s.ttft_counts for s in samples])
        counted = counted if counted.any() else mine
        lines.append(f'"{name}" = {{ ttft = {ttft_error[counted].mean():.3f}, tpot = {tpot_error[mine].mean():.3f} }}')
    return lines


def main(data: str) -> None:
    samples, dropped = load_rows(Path(data) / "measured" / "serving_hopper.csv")
    fitter = Fitter(samples)
    x = fitter.fit(np.ones(len(samples)))
    fitted_file().write_text(engines_toml(fitter, x, fitter.left_out()), encoding="utf-8")
    print(f"{len(samples)} rows, dropped {dict(dropped)}: {fitted_file()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
