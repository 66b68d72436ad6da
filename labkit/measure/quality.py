"""What a result says about itself: whether the client, the load and the machine let it mean what it seems to.

Each check looks at one way in which a benchmark misleads and answers with a verdict: `ok` (looked at, and the
evidence), `info`, `warn`, or `bad` (the figures do not stand). The five that every result must carry always
answer; the others speak only when there is something to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from labkit.measure.breakdown import ttft_parts_ms
from labkit.measure.metrics import Objective, Window, counted, is_requeued, num_tokens
from labkit.measure.records import Environment, RequestRecord
from labkit.measure.statistics import Summary, few, percentile
from labkit.measure.steady import steady_state

MAX_LAG_SHARE = 0.1
"""Of an objective: a client that is later than this blames its own delay on the server."""
MAX_RATE_ERROR = 0.005
MAX_UNACCOUNTED = 0.01


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the records themselves do not say of their run."""

    objective: Objective = field(default_factory=Objective)
    environment: Environment | None = None
    sharing_expected: bool = False
    """The workload shares prefixes on purpose, so that a warm cache is its subject."""
    num_foreign: int = 0
    """Requests of others that the server worked on meanwhile."""
    stopped_early: bool = False
    notices: tuple[str, ...] = ()
    """Sentences from elsewhere (a gloo fallback, a shared GPU) that belong on every figure."""


Verdict = dict[str, str]


def verdicts(
    records: Sequence[RequestRecord], window: Window, about: Circumstances | None = None
) -> list[Verdict]:
    """[{code, severity, sentence}]: first the five that always answer, then what else was found."""
    about = about or Circumstances()
    rows = counted(records, window)
    if not rows:
        return [
            _verdict("no-requests", "bad", "No request was scheduled after the warm-up: there is no figure.")
        ]
    found = [
        client_lag(rows, about.objective),
        schedule_kept(rows),
        warm_cache(rows, about.sharing_expected),
        enough_samples(rows),
        ranks_and_cores(about.environment),
    ]
    return found + list(_others(records, rows, window, about))


def trusted(quality: Sequence[Verdict]) -> bool:
    """Whether goodput may be believed: not when the client's own lag could have missed the objective."""
    return not any(verdict["code"] == "client-lag" and verdict["severity"] == "bad" for verdict in quality)


def _verdict(code: str, severity: str, sentence: str) -> Verdict:
    return {"code": code, "severity": severity, "sentence": sentence}


def client_lag(rows: Sequence[RequestRecord], objective: Objective) -> Verdict:
    """A late send lengthens TTFT by the lag, TPOT by at most the lag over the answer's gaps."""
    lags = [(record.sent_ns - record.scheduled_ns) / 1e6 for record in rows if record.sent_ns]
    lag = percentile(lags, 99)
    if lag is None:
        return _verdict("client-lag", "bad", "The client sent nothing: its lag is unknown.")
    gaps = max(1.0, float(np.median([num_tokens(record) for record in rows])) - 1)
    limits = [("TTFT", lag, objective.ttft_ms), ("TPOT", lag / gaps, objective.tpot_ms)]
    for name, effect, limit in limits:
        if limit is not None and effect > limit * MAX_LAG_SHARE:
            return _verdict(
                "client-lag",
                "bad",
                f"The client sent its requests up to {lag:.1f} ms late (p99), more than a tenth of the "
                f"{name} objective of {limit:g} ms: goodput is not to be trusted. Lower the rate, or give "
                "the client a core of its own.",
            )
    return _verdict("client-lag", "ok", f"The client sent its requests at most {lag:.1f} ms late (p99).")


def schedule_kept(rows: Sequence[RequestRecord]) -> Verdict:
    """Requests per second as sent, against the same requests as scheduled."""
    unsent = sum(record.status == "unsent" for record in rows)
    if unsent:
        sentence = f"{unsent} of {len(rows)} scheduled requests were never sent; they count as misses."
        return _verdict("schedule", "bad", sentence)
    planned, offered = _rate([r.scheduled_ns for r in rows]), _rate([r.sent_ns for r in rows])
    if planned is None or offered is None:
        return _verdict(
            "schedule", "info", "One request makes no rate: whether a schedule was kept cannot be told."
        )
    error = offered / planned - 1
    sentence = f"Offered {offered:.3g} requests/s of {planned:.3g} scheduled ({error:+.2%})."
    if abs(error) > MAX_RATE_ERROR:
        return _verdict(
            "schedule", "warn", f"{sentence} The client did not keep its schedule; lower the rate."
        )
    return _verdict("schedule", "ok", sentence)


def _rate(instants_ns: Sequence[int]) -> float | None:
    span_ns = max(instants_ns) - min(instants_ns)
    return (len(instants_ns) - 1) / (span_ns / 1e9) if span_ns > 0 else None


def warm_cache(rows: Sequence[RequestRecord], sharing_expected: bool) -> Verdict:
    """Cached prompt tokens make TTFT better than a first visitor's, unless they are what is being shown."""
    cached, total = sum(r.cached_tokens for r in rows), sum(r.prompt_tokens for r in rows)
    share = cached / total if total else 0.0
    sentence = f"{share:.1%} of the prompt tokens came from the prefix cache"
    if share <= 0.01:
        return _verdict("warm-cache", "ok", f"{sentence}.")
    if sharing_expected:
        return _verdict("warm-cache", "info", f"{sentence}, as this workload means it.")
    return _verdict(
        "warm-cache",
        "warn",
        f"{sentence}, though the workload shares no prefixes: TTFT is flattered. Use another seed, or switch "
        "the layout, which empties the cache.",
    )


def enough_samples(rows: Sequence[RequestRecord]) -> Verdict:
    """A percentile with fewer than ten samples beyond it is the fate of single requests."""
    n = sum(record.status == "completed" for record in rows)
    missing = few(n)
    if not missing:
        return _verdict(
            "samples", "ok", f"{n} completed requests: ten or more lie beyond every percentile shown."
        )
    return _verdict(
        "samples",
        "warn" if "p50" in missing else "info",
        f"Too few completed requests ({n}) for {', '.join(missing)}: fewer than ten lie beyond. "
        "A p99 needs 1000.",
    )


def ranks_and_cores(environment: Environment | None) -> Verdict:
    if environment is None:
        return _verdict("ranks-and-cores", "info", "A foreign server: its ranks and cores are not known.")
    threads = environment.num_ranks * environment.threads_per_rank
    ranks = f"{environment.num_ranks} rank{'s' if environment.num_ranks > 1 else ''}"
    if environment.backend == "cpu" and threads > environment.num_cores:
        return _verdict(
            "ranks-and-cores",
            "warn",
            f"{ranks} of {environment.threads_per_rank} thread(s) share {environment.num_cores} core(s): "
            "they wait for each other's time slices, so speed here says nothing about a machine that has the "
            "cores. Memory, bytes and counts are right.",
        )
    return _verdict(
        "ranks-and-cores", "ok", f"{ranks} on {environment.num_cores} cores ({environment.backend})."
    )


# ---- what speaks only when there is something to say


def _others(
    records: Sequence[RequestRecord], rows: Sequence[RequestRecord], window: Window, about: Circumstances
) -> Iterator[Verdict]:
    yield from _failures(rows)
    yield from _lengths(rows)
    yield from _unsteady(records, window)
    yield from _unaccounted(rows)
    requeued = sum(map(is_requeued, records))
    if requeued:
        sentence = f"{requeued} requests lived through a switch of layout and are in no figure."
        yield _verdict("requeued", "info", sentence)
    if about.num_foreign:
        sentence = f"The server also worked on {about.num_foreign} requests of others during this run."
        yield _verdict("foreign-requests", "bad", sentence)
    if about.stopped_early:
        yield _verdict("stopped", "warn", "The run was stopped before its schedule was over.")
    for notice in about.notices:
        yield _verdict("notice", "warn", notice)


def _failures(rows: Sequence[RequestRecord]) -> Iterator[Verdict]:
    broken = [r for r in rows if r.status in ("failed", "refused", "cancelled")]
    if broken:
        counts = {
            status: sum(r.status == status for r in broken) for status in ("failed", "refused", "cancelled")
        }
        kinds = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        first = next((r.error for r in broken if r.error), "")
        sentence = (
            f"Of {len(rows)} requests {kinds}: latencies are over the rest, goodput counts them as misses."
        )
        yield _verdict("failures", "warn", sentence + (f" The first said: {first}" if first else ""))


def _lengths(rows: Sequence[RequestRecord]) -> Iterator[Verdict]:
    """The server's template or tokeniser may make another prompt of what was asked."""
    told = [r for r in rows if r.prompt_tokens and r.asked_prompt_tokens]
    asked, got = sum(r.asked_prompt_tokens for r in told), sum(r.prompt_tokens for r in told)
    if asked and abs(got / asked - 1) > 0.02:
        sentence = f"The server counted {got / asked - 1:+.0%} prompt tokens against those asked for."
        yield _verdict("prompt-length", "warn", sentence)


def _unsteady(records: Sequence[RequestRecord], window: Window) -> Iterator[Verdict]:
    """`labkit.measure.steady` says since when, if at all."""
    found = steady_state(records, window)
    if found["why"] == "filling":
        yield _verdict("settling", "info", f"{found['sentence']} A longer run would show its figures under full load.")
    elif found["why"]:
        more = ": the rate is more than the server can take" if found["why"] == "queue" else ""
        yield _verdict(
            "not-steady", "warn", f"{found['sentence']} The figures depend on how long one waits{more}."
        )
    elif found["settling_s"]:
        sentence = f"{found['sentence']} The first {found['settling_s']:.1f} s of the window were not, and are in"
        yield _verdict("settling", "info", f"{sentence} the figures: a longer warm-up leaves them out.")


def _unaccounted(rows: Sequence[RequestRecord]) -> Iterator[Verdict]:
    served = [r for r in rows if r.status == "completed" and r.server is not None]
    parts = [p for p in map(ttft_parts_ms, served) if p is not None]
    if len(parts) < len(served):
        sentence = "The server's clock is not the client's: TTFT is not split into parts for some requests."
        yield _verdict("clocks", "info", sentence)
    total = sum(map(sum, parts))
    share = sum(abs(p[-1]) for p in parts) / total if total else 0.0
    if share > MAX_UNACCOUNTED:
        yield _verdict(
            "unaccounted", "warn", f"{share:.1%} of TTFT is in none of its parts (at most 1 % should be)."
        )


def worst(quality: Sequence[Summary]) -> str:
    """The severest of ok, info, warn, bad."""
    order = ("ok", "info", "warn", "bad")
    return max((verdict["severity"] for verdict in quality), key=order.index, default="ok")
