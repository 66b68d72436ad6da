"""The table of `predict_here.py`: a line of it, what is said under it, and the page for a reader."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from labkit.plan.calibration import Calibration

ALLOWED = {"ttft_p50": 0.10, "tpot_p50": 0.10, "ttft_p95": 0.20, "tpot_p95": 0.20}


def head() -> str:
    columns = "".join(f"{f'{name} ms':>12}{'measured':>9}{'error':>7} " for name in ALLOWED)
    return f"{'workload':<14}{'':<6}{'rate':>5}{'n':>5}{'speed':>7}{columns}"


def line(row: dict[str, Any]) -> str:
    cells = "".join(
        f"{row['predicted'][name]:>12.1f}{row['measured'][name]:>9.1f}{row['error'][name]:>+7.0%}"
        f"{' ' if abs(row['error'][name]) <= allowed else '!'}"
        for name, allowed in ALLOWED.items()
    )
    return f"{row['workload']:<14}{row['layout']:<6}{row['rate']:>5.2g}{row['n']:>5}{row['speed']:>7.2f}{cells}"


def report(rows: list[dict[str, Any]], calibration: Calibration, others: float | None) -> list[str]:
    """The sentences under the table, and the JSON line."""
    found, said = {}, []
    for kind, words in (("error", "as calibrated"), ("error_at_own_speed", "at each row's own speed")):
        within = {name: sum(abs(row[kind][name]) <= allowed for row in rows) for name, allowed in ALLOWED.items()}
        mean = {name: float(np.mean([abs(row[kind][name]) for row in rows])) for name in ALLOWED}
        found[kind] = {"within": within, "mean": mean}
        told = "; ".join(
            f"{name} {within[name]} of {len(rows)} within {allowed:.0%}, {mean[name]:.0%} on average"
            for name, allowed in ALLOWED.items()
        )
        said.append(f"{words[0].upper()}{words[1:]}: {told}.")
    speeds = [speed for row in rows for speed in row["speeds"]]
    said.append(
        f"The steps of one run took {min(speeds):.2f} to {max(speeds):.2f} of what the calibration says, "
        f"those of a row {min(row['speed'] for row in rows):.2f} to {max(row['speed'] for row in rows):.2f}."
    )
    print("\n".join(said))
    print(json.dumps({"rows": rows, **found, "others_share": others, "calibration": calibration.about}))
    return said


def markdown(rows: list[dict[str, Any]], calibration: Calibration, said: list[str]) -> list[str]:
    about = calibration.about
    machine = f"{about['model']}, {about['num_ranks']} ranks on {about['num_cores']} cores, {about['measured_at'][:10]}"
    lines = [
        "# Predicted against measured on one machine",
        "",
        "Written by `benchmarks/predict_here.py`; do not edit. Steps were measured by `labkit calibrate`, the",
        "workloads were no part of it, and the simulator ran the schedule that was then sent. Milliseconds, predicted",
        "and measured; `speed` is what a row's own steps took over what the calibration says of such steps.",
        "",
        f"{machine}; others had {about['others_share']:.1%} of the cores while it was calibrated. "
        f"{len(rows[0]['speeds'])} runs of {rows[0]['seconds']:.1f} s a row, each with arrivals of its own, "
        f"in rounds over all rows; lengths times {rows[0]['scale']:g}, one rate a workload.",
        *calibration.notes,
        "",
        f"| workload | layout | requests/s | requests | speed | {' | '.join(ALLOWED).replace('_', ' ')} |",
        "|---|---|---|---|---|" + "---|" * len(ALLOWED),
        *map(table_row, rows),
    ]
    return [*lines, *(line for sentence in said for line in ("", sentence))]


def table_row(row: dict[str, Any]) -> str:
    expected, found, error = row["predicted"], row["measured"], row["error"]
    cells = [f"{expected[name]:.1f} / {found[name]:.1f} ({error[name]:+.0%})" for name in ALLOWED]
    run = [row["workload"], row["layout"], f"{row['rate']:g}", str(row["n"]), f"{row['speed']:.2f}"]
    return f"| {' | '.join([*run, *cells])} |"
