"""A plan for a reader: the walk, what was chosen, its checks, the commands to copy, and why the others were not taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from labkit.plan.advise import Advice
from labkit.plan.candidates import Candidate
from labkit.plan.objective import spoken_ms
from labkit.plan.reasons import grouped
from labkit.plan.remedies import settings_changed

MARKS = {"yes": "[green]yes[/green]", "no": "no", "not asked": "[dim]not asked[/dim]"}
STATES = {"passed": "[green]passed[/green]", "failed": "[red]failed[/red]",
          "not yet measured": "[yellow]not yet measured[/yellow]"}  # fmt: skip
MOST_EXAMPLES = 3


def plan_view(advice: Advice) -> Group:
    """Everything, top to bottom."""
    parts: list[Any] = [*_head(advice), *_diagnosis(advice), *_walk(advice), *_chosen(advice), *_checks(advice)]
    parts += [*_placement(advice), *_commands(advice), *_front(advice), *_others(advice), *_next(advice)]
    return Group(*parts)


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _head(advice: Advice) -> Iterator[Any]:
    case = advice.case
    wish = "planned, for what was measured, as if asked" if advice.correction else "asked"
    yield Text(
        f"{case.spec.name} on {case.hardware.name}, {case.demand.name} at {case.demand.load} "
        f"({case.demand.prompt_tokens:,} tokens in, {case.demand.output_tokens:,} out), {wish}: {case.objective}."
    )


def _diagnosis(advice: Advice) -> Iterator[Any]:
    if advice.diagnosis is None:
        return
    yield _title("What the run shows")
    yield Text(advice.diagnosis.sentence)
    table = Table(box=None, padding=(0, 1))
    for name in ("resource", "state", "evidence", "would be measured by"):
        table.add_column(name)
    for finding in advice.diagnosis.findings:
        table.add_row(finding.resource, finding.state, escape(finding.sentence), escape(finding.measure))
    yield table


def _walk(advice: Advice) -> Iterator[Any]:
    yield _title("The walk")
    for number, question in enumerate(advice.walk, 1):
        yield Text.from_markup(f"{number}. {escape(question.question)} {MARKS.get(question.answer, question.answer)}")
        if question.answer != "not asked":
            yield Padding(Text(question.sentence), (0, 0, 0, 4))


def _chosen(advice: Advice) -> Iterator[Any]:
    yield _title("Chosen")
    chosen = advice.chosen
    if chosen is None:
        assert advice.infeasible is not None
        yield Text(advice.infeasible.sentence, style="red")
        if advice.infeasible.nearest:
            told = "; ".join(str(outcome) for outcome in advice.infeasible.nearest)
            yield Text(f"Nearest in all: {advice.infeasible.nearest_layout}: {told}.")
        return
    yield Text.from_markup(f"[bold green]{escape(str(chosen.layout))}[/bold green] on {chosen.num_gpus} "
                           f"GPU{'s' if chosen.num_gpus > 1 else ''} ({advice.kind})")  # fmt: skip
    if not chosen.does:
        yield Text(f"  Nothing passes all; this comes nearest. {chosen.reason}", style="red")
    changed = settings_changed(advice.case.settings, chosen.settings)
    if changed:
        yield Text("  with " + ", ".join(f"{name} {value}" for name, value in changed.items()))
    yield Text("\n".join(_figures(advice, chosen)))


def _figures(advice: Advice, chosen: Candidate) -> Iterator[str]:
    found, q = chosen.prediction, advice.case.objective.percentile
    if found is None:
        return
    for name, table, band in (("TTFT", found.ttft_ms, found.band_ttft), ("TPOT", found.tpot_ms, found.band_tpot)):
        yield f"  {name} {q} {spoken_ms(table[q])} ±{band:.0%} (median {spoken_ms(table['p50'])}), predicted"
    yield f"  by {found.source}"
    yield f"  {found.tokens_per_s:,.0f} output tokens/s, {chosen.tokens_per_gpu or 0:,.0f} a GPU; " \
          f"KV holds {chosen.most_requests} such requests, {found.concurrency:.0f} in flight"  # fmt: skip
    if chosen.cost_per_million is not None:
        yield f"  ${chosen.cost_per_million:.2f} for a million output tokens at ${advice.case.price} a GPU and hour"
    for axis, why in advice.jobs.items():
        yield f"  {axis}: {why}"


def _checks(advice: Advice) -> Iterator[Any]:
    if not advice.checks:
        return
    yield _title("Checks before it is deployed")
    table = Table(box=None, padding=(0, 1))
    for name in ("axis", "check", "state", "figures"):
        table.add_column(name)
    for check in advice.checks:
        more = f" Measure: {check.measure}." if check.measure else ""
        table.add_row(check.axis, check.name, STATES[check.status], escape(check.sentence + more))
    yield table


def _placement(advice: Advice) -> Iterator[Any]:
    if advice.places is None or len(advice.places.ranks) < 2:
        return
    yield _title("Ranks on GPUs")
    nodes: dict[int, list[str]] = {}
    for row in advice.places.ranks:
        at = " ".join(f"{axis}{row[axis]}" for axis in ("dp", "pp", "pcp", "tp"))
        nodes.setdefault(row["node"], []).append(f"GPU {row['gpu']}: {at}")
    for node, rows in nodes.items():
        yield Text(f"  node {node}: {'; '.join(rows)}")


def _commands(advice: Advice) -> Iterator[Any]:
    for entry in advice.commands:
        mine = entry["engine"] == advice.case.engine or advice.case.engine == "labkit"
        if not mine:
            continue
        yield _title(f"Commands ({entry['name']} {entry['version']})")
        if entry["refused"]:
            yield Text(entry["refused"])
        for command in entry["commands"]:
            yield Text(f"# {command['role']}", style="dim")
            yield Text(command["text"], overflow="fold")
            for note in command["notes"]:
                yield Text(f"  {note}", style="dim")


def _front(advice: Advice) -> Iterator[Any]:
    if not advice.front:
        return
    q = advice.case.objective.percentile
    yield _title(f"The front of TTFT {q}, TPOT {q} and tokens per GPU")
    table = Table(box=None, padding=(0, 1))
    for name in ("layout", "GPUs", "TTFT", "TPOT", "tokens/s a GPU", "$ a million"):
        table.add_column(name)
    for one in advice.front:
        cost = "" if one.cost_per_million is None else f"{one.cost_per_million:.2f}"
        table.add_row(str(one.layout), str(one.num_gpus), spoken_ms(one.figure("ttft", q)),
                      spoken_ms(one.figure("tpot", q)), f"{one.tokens_per_gpu:,.0f}", cost)  # fmt: skip
    yield table


def _others(advice: Advice) -> Iterator[Any]:
    groups = grouped(advice.layouts, advice.chosen)
    number = sum(len(rows) for _, _, rows in groups)
    yield _title(f"Why not the others ({number} layouts; --json has each one's reason)")
    for _, told, rows in groups:
        first = ", ".join(str(one.layout) for one in rows[:MOST_EXAMPLES])
        more = f" and {len(rows) - MOST_EXAMPLES} more" if len(rows) > MOST_EXAMPLES else ""
        yield Text(f"  {len(rows):4} {told}: {first}{more}")
        if rows[0].reason:
            yield Text(f"       such as: {rows[0].reason}", style="dim")


def _next(advice: Advice) -> Iterator[Any]:
    if not advice.next:
        return
    yield _title("What to measure next")
    for line in advice.next:
        yield Text(f"  {line}")


