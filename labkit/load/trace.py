"""Recorded traffic, replayed: public traces of production services become schedules with their own arrivals.

Three formats are read, told apart by what the file says: Azure 2023 (CSV: TIMESTAMP, ContextTokens,
GeneratedTokens), BurstGPT (CSV: Timestamp, Request tokens, Response tokens) and Mooncake (JSON lines with
`hash_ids`, one per block of 512 prompt tokens: equal ids are equal tokens here too, so that a prefix cache
finds what it found there).
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from labkit.load.prompts import PromptMaker
from labkit.load.schedule import Outline, PlannedRequest, Schedule, fit, fit_lengths
from labkit.paths import is_readable, read_text

MOONCAKE_BLOCK_TOKENS = 512
FORMATS = "Azure 2023 csv, BurstGPT csv, or Mooncake jsonl"


class TraceRow(msgspec.Struct, frozen=True):
    """One recorded request: seconds since the trace's first, and lengths in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def find_trace(path: str | Path) -> Path:
    """The path, when a file is there: one that can be read again, by another process too. Raises FileNotFoundError
    when none is."""
    if not Path(path).is_file() and is_readable(path):
        raise FileNotFoundError(f"{path} is a pipe, and a trace is read twice: write it to a file, and name that.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no trace at {path}; give the path of a file: {FORMATS}.")
    return Path(path)


def read_trace(path: str | Path) -> list[TraceRow]:
    """All rows, in order of arrival, the first at 0 s. Rows without an answer (failed there) are left out.

    Raises ValueError when the file is in none of the known formats, or holds no request.
    """
    path = find_trace(path)
    text = read_text(path, "trace")
    lines, is_json = text.splitlines(), path.suffix in (".jsonl", ".json") or text.lstrip().startswith("{")
    try:
        raw = list(_mooncake(lines, path) if is_json else _table(lines, path))
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV: {error}; expected {FORMATS}.") from None
    answered = (row for row in raw if row.prompt_tokens > 0 and row.output_tokens > 0)
    rows = sorted(answered, key=lambda row: row.at_s)
    if not rows:
        raise ValueError(f"{path} holds no request with a prompt and an answer; expected {FORMATS}.")
    first_s = rows[0].at_s
    return [msgspec.structs.replace(row, at_s=row.at_s - first_s) for row in rows]


def _mooncake(lines: Iterable[str], path: Path) -> Iterator[TraceRow]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number} is not a Mooncake row: {error}.") from error
        yield TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def _table(lines: Iterable[str], path: Path) -> Iterator[TraceRow]:
    reader = csv.DictReader(lines)
    columns = set(reader.fieldnames or ())
    seconds: Callable[[str], float]
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
        names, seconds = ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_seconds
    elif {"Timestamp", "Request tokens", "Response tokens"} <= columns:
        names, seconds = ("Timestamp", "Request tokens", "Response tokens"), float
    else:
        raise ValueError(f"{path} has columns {sorted(columns)}: no known trace; expected {FORMATS}.")
    for row in reader:
        try:
            found = TraceRow(seconds(row[names[0]]), int(row[names[1]]), int(row[names[2]]))
        except (TypeError, ValueError, OverflowError):  # a short row has None
            found = None
        if found is None or not math.isfinite(found.at_s):
            given = ", ".join(f"{name} {row[name]!r}" for name in names)
            raise ValueError(
                f"{path}, line {reader.line_num}: {given}. A row needs an instant and two whole numbers of tokens: "
                "mend it or take it out."
            )
        yield found


def _azure_seconds(stamp: str) -> float:
    """Seconds since 1970 of `2023-11-16 18:15:46.6805900` (seven decimals; one zone all through)."""
    whole, _, fraction = stamp.partition(".")
    moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
    digits = fraction.split("+")[0].rstrip("Z")
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def trace_schedule(
    path: str | Path,
    start_s: float = 0.0,
    seconds: float | None = None,
    num_requests: int | None = None,
    time_scale: float = 1.0,
    rate: float | None = None,
    length_scale: float = 1.0,
    max_context: int | None = None,
    seed: int = 0,
    vocab_size: int = 8192,
    run_id: str = "",
) -> Schedule:
    """A schedule from a window of a trace.

    start_s, seconds: the window, in the trace's own time. time_scale: 2 replays twice as fast. rate: instead,
    the mean requests per second that the window is stretched to. length_scale: multiplies lengths (prefix
    blocks too).
    """
    rows, span_s, speed = _rows_of(path, start_s, seconds, num_requests, time_scale, rate, length_scale)
    maker = PromptMaker(vocab_size, seed, run_id)
    requests = tuple(_planned(rows, start_s, speed, length_scale, max_context, maker))
    return Schedule(
        workload=Path(path).stem,
        requests=requests,
        rate=len(rows) / span_s * speed,
        seconds=span_s / speed,
        seed=seed,
    )


def trace_outline(
    path: str | Path,
    start_s: float = 0.0,
    seconds: float | None = None,
    num_requests: int | None = None,
    time_scale: float = 1.0,
    rate: float | None = None,
    length_scale: float = 1.0,
    max_context: int | None = None,
) -> list[Outline]:
    """The requests of `trace_schedule`, at the same instants, and none of the token ids made."""
    rows, _, speed = _rows_of(path, start_s, seconds, num_requests, time_scale, rate, length_scale)
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS * length_scale))
    outlines = []
    for row in rows:
        num_prompt = max(1, round(row.prompt_tokens * length_scale))
        num_output = max(1, round(row.output_tokens * length_scale))
        num_prompt, num_output = fit_lengths(min(num_prompt, max_context or num_prompt), num_output, max_context)
        outlines.append(Outline((row.at_s - start_s) / speed, num_prompt, num_output, row.block_ids, block_tokens))
    return outlines


def _rows_of(
    path: str | Path, start_s: float, seconds: float | None, num_requests: int | None, time_scale: float,
    rate: float | None, length_scale: float,
) -> tuple[list[TraceRow], float, float]:  # fmt: skip
    """The rows of a window, how long it is, and how many times faster it is replayed."""
    if not all(0 < value < math.inf for value in (time_scale, length_scale, 1.0 if rate is None else rate)):
        given = f"{time_scale}, {length_scale}, {rate}"
        raise ValueError(f"time_scale, length_scale and rate must be above 0; got {given}.")
    rows = _window(read_trace(path), start_s, seconds, num_requests, path)
    span_s = max((rows[-1].at_s - start_s) if seconds is None else seconds, 1e-9)
    return rows, span_s, time_scale if rate is None else rate * span_s / len(rows)


def _window(
    rows: list[TraceRow], start_s: float, seconds: float | None, num_requests: int | None, path: str | Path
) -> list[TraceRow]:
    end_s = float("inf") if seconds is None else start_s + seconds
    inside = [row for row in rows if start_s <= row.at_s < end_s][:num_requests]
    if not inside:
        last_s = rows[-1].at_s
        raise ValueError(f"{path} has no request from {start_s} s to {end_s} s; it ends at {last_s:.0f} s.")
    return inside


def _planned(
    rows: list[TraceRow],
    start_s: float,
    speed: float,
    scale: float,
    max_context: int | None,
    maker: PromptMaker,
) -> Iterator[PlannedRequest]:
    before_s = 0.0
    for index, row in enumerate(rows):
        at_s = (row.at_s - start_s) / speed
        yield _request(index, row, at_s, at_s - before_s, scale, max_context, maker)
        before_s = at_s


def _request(
    index: int,
    row: TraceRow,
    at_s: float,
    gap_s: float,
    scale: float,
    max_context: int | None,
    maker: PromptMaker,
) -> PlannedRequest:
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS * scale))
    num_prompt = max(1, round(row.prompt_tokens * scale))
    num_output = max(1, round(row.output_tokens * scale))
    num_made = min(num_prompt, max_context or num_prompt)
    ids, num_kept = fit(maker.from_blocks(row.block_ids, block_tokens, num_made), num_output, max_context)
    return PlannedRequest(
        index=index,
        gap=gap_s,
        prompt_ids=ids,
        max_tokens=num_kept,
        at_s=at_s,
        part="trace",
        prefix_id=row.block_ids[0] if row.block_ids else -1,
        block_ids=row.block_ids,
        cut=len(ids) + num_kept < num_prompt + num_output,
    )
