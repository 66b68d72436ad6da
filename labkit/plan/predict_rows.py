"""Rows of measured servings with what the planner would have said beside them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from labkit.paths import read_text, require_writable, write_whole
from labkit.plan.cost import step_cost
from labkit.plan.measured_rows import COLUMNS, ROUNDS, Row, read_row
from labkit.plan.predict import Prediction, predict_closed

ADDED = ("ttft_ms", "tpot_ms", "kv_full", "source", "band_ttft", "band_tpot", "refused")


def predict_row(row: Row) -> Prediction:
    """Raises ValueError when the model does not fit those GPUs."""
    cost = step_cost(
        row.layout, row.spec, row.hardware, row.settings, row.engine, version=row.version, graph_tokens=row.graph_tokens
    )
    return predict_closed(
        row.layout, row.spec, row.hardware, row.settings, prompt_tokens=row.prompt, output_tokens=row.output,
        concurrency=row.concurrency, engine=row.engine, rounds=ROUNDS, version=row.version, wait_steps=row.wait_steps,
        exact_lengths=not row.inferencex, cost=cost,
    )  # fmt: skip


def answer(given: Mapping[str, str]) -> dict[str, str]:
    """The added columns of one row; a row that cannot be predicted gets a sentence in `refused` and nothing else."""
    try:
        found = predict_row(read_row(given))
    except (ValueError, ArithmeticError) as error:
        return {**dict.fromkeys(ADDED, ""), "refused": str(error)}
    return {
        "ttft_ms": f"{found.ttft_ms['mean']:.3f}", "tpot_ms": f"{found.tpot_ms['mean']:.4f}",
        "kv_full": str(found.kv_full).lower(), "source": found.source, "band_ttft": f"{found.band_ttft:.3f}",
        "band_tpot": f"{found.band_tpot:.3f}", "refused": "",
    }  # fmt: skip


def predict_file(rows: Path, out: Path) -> tuple[int, int]:
    """Writes the rows with the added columns, all of them or nothing; (rows, refused among them). Raises ValueError
    with a sentence for what cannot be read or written."""
    columns, given = _read(rows)
    out = require_writable(out)
    kept = [name for name in columns if name not in ADDED]
    answers = [answer(row) for row in given]
    lines = io.StringIO(newline="")
    writer = csv.DictWriter(lines, [*kept, *ADDED])
    writer.writeheader()
    for row, added in zip(given, answers, strict=True):
        writer.writerow({**{name: row[name] for name in kept}, **added})
    write_whole(out, lines.getvalue())
    return len(given), sum(bool(added["refused"]) for added in answers)


def _read(rows: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV."""
    reader = csv.DictReader(io.StringIO(read_text(rows, "CSV of rows"), newline=""))
    try:
        columns = list(reader.fieldnames or ())
        missing = [name for name in COLUMNS if name not in columns]
        if missing:
            raise ValueError(f"{rows} lacks the columns {', '.join(missing)}: give those of serving_hopper.csv.")
        given = [{name: (row.get(name) or "") for name in columns} for row in reader]
    except csv.Error as error:
        raise ValueError(f"{rows}, line {reader.line_num} is not CSV: {error}. Mend it or take it out.") from None
    if not given:
        raise ValueError(f"{rows} has columns and no row under them: there is nothing to predict.")
    return columns, given
