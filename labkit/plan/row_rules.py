"""Which measured rows are compared with a prediction: written rules, each with the number of rows that it drops.

A rule looks at what was measured and at the datasheet, never at a prediction of ours.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from labkit.plan.fit_serving import Sample
from labkit.plan.measured_rows import Row, RowError, read_row
from labkit.plan.stage_shape import stage_shapes

RULES = {
    "contradiction": "more GPUs than the node has, or experts and attention that count different GPUs",
    "repeated": "a setting that an earlier row measured (DeepSeek-R1 and V3 are one model)",
    "KV full": "from the concurrency on at which TTFT exceeds three times the step before while TPOT rises by less "
    "than three quarters of what concurrency does, and rows whose TTFT is more than half of the request's life",
    "beats the roofline": "every row of a set (model, GPU, engine, version) in which a TPOT is below the datasheet's "
    "roofline of its work: prompts were found in a cache",
    "TPOT falls with load": "every row of a set in which, of all pairs of rows of a layout with twice the concurrency "
    "or more and a roofline that is a quarter higher, most have no higher TPOT: a step that the host alone decides (no "
    "CUDA graphs)",
    "TTFT falls with load": "the TTFT (not the TPOT) of a set in which most steps up in concurrency of a series lower "
    "it: a queue for something else than compute",
}


def load_rows(file: Path) -> tuple[list[Sample], Counter[str]]:
    """Rows that can be compared, in the file's order, and how many each rule dropped."""
    dropped: Counter[str] = Counter(dict.fromkeys(RULES, 0))
    samples: dict[tuple[object, ...], Sample] = {}
    with file.open(newline="", encoding="utf-8") as lines:
        for given in csv.DictReader(lines):
            try:
                row = read_row(given)
            except RowError:
                dropped["contradiction"] += 1
                continue
            key = (*series_key(row), row.concurrency)
            if key in samples:
                dropped["repeated"] += 1
                continue
            samples[key] = Sample(row, float(given["silicon_ttft_ms"]) / 1e3, float(given["silicon_tpot_ms"]) / 1e3)
    kept = list(samples.values())
    full = {id(sample) for series in series_of(kept) for sample in series[first_full(series) :]}
    full |= {id(sample) for sample in kept if mostly_waits(sample)}
    dropped["KV full"] = len(full)
    kept = [sample for sample in kept if id(sample) not in full]
    for name, is_odd in (("beats the roofline", _beats_roofline), ("TPOT falls with load", _tpot_falls)):
        odd = {id(sample) for group in _sets(kept) if is_odd(group) for sample in group}
        dropped[name] = len(odd)
        kept = [sample for sample in kept if id(sample) not in odd]
    odd = {id(sample) for group in _sets(kept) if _ttft_falls(group) for sample in group}
    dropped["TTFT falls with load"] = len(odd)
    return [Sample(s.row, s.ttft_s, s.tpot_s, id(s) not in odd) for s in kept], dropped


def series_key(row: Row) -> tuple[object, ...]:
    """Everything but the concurrency."""
    gpu = row.hardware.device.name
    return row.model, gpu, row.engine, row.version, row.precision, row.layout, row.prompt, row.output


def series_of(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Rows that differ in concurrency only, ascending."""
    found: dict[tuple[object, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        found[series_key(sample.row)].append(sample)
    return [sorted(series, key=lambda s: s.row.concurrency) for series in found.values()]


def first_full(series: list[Sample]) -> int:
    """Index of the first row with KV full in a series; its length when there is none."""
    for at in range(1, len(series)):
        before, here = series[at - 1], series[at]
        more = here.row.concurrency / before.row.concurrency
        flat = here.tpot_s / before.tpot_s < 0.75 * more
        waits = here.ttft_s > 0.05 * (here.ttft_s + here.tpot_s * (here.row.output - 1))
        if here.ttft_s > 3 * before.ttft_s and flat and waits:
            return at
    return len(series)


def mostly_waits(sample: Sample) -> bool:
    """Whether TTFT is more than half of the request's life."""
    return sample.ttft_s > sample.tpot_s * (sample.row.output - 1)


def _sets(samples: Iterable[Sample]) -> list[list[Sample]]:
    found: dict[tuple[object, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        found[series_key(sample.row)[:4]].append(sample)
    return list(found.values())


def roofline_tpot(sample: Sample) -> float:
    """The least TPOT that the datasheet allows: weights, touched experts and KV once a step, and the operations of the
    others' prompts that fall into a request's decoding."""
    row = sample.row
    shape = stage_shapes(row.layout, row.spec, row.hardware, 1, True)[0]
    requests, context = row.concurrency / row.layout.dp, row.prompt + row.output / 2
    touched = 1 - shape.expert_miss ** (requests * shape.expert_replicas)
    window = min(context, row.spec.sliding_window or context)
    cached = requests * (context * shape.context_bytes + window * shape.window_context_bytes)
    read = shape.dense_bytes + shape.expert_bytes * touched + shape.head_bytes + cached
    prompt = row.prompt * (shape.dense_flops / shape.dense_rate + shape.expert_flops / shape.expert_rate)
    decoding = sample.tpot_s * (row.output - 1)
    share = decoding / (decoding + sample.ttft_s)
    return read / row.hardware.device.memory_bandwidth.value + (requests - 1) * prompt / row.output * share


def _beats_roofline(group: list[Sample]) -> bool:
    return any(sample.tpot_s < roofline_tpot(sample) for sample in group)


def _tpot_falls(group: list[Sample]) -> bool:
    pairs = [
        (a, b) for a in group for b in group
        if a.row.layout == b.row.layout and b.row.concurrency >= 2 * a.row.concurrency
        and roofline_tpot(b) > 1.25 * roofline_tpot(a)
    ]  # fmt: skip
    return len(pairs) > 2 and sum(b.tpot_s <= a.tpot_s for a, b in pairs) > len(pairs) / 2


def _ttft_falls(group: list[Sample]) -> bool:
    steps = [pair for series in series_of(group) for pair in zip(series, series[1:], strict=False)]
    return len(steps) > 5 and sum(b.ttft_s < a.ttft_s for a, b in steps) > len(steps) / 2
