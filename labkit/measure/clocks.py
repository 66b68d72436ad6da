"""How sure the instants of several hosts are against each other, in words: what is shorter than that means nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def clocks_of(summary: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """As `ClockRecord`, of hosts beside the engine's; None where the run does not tell (foreign, or an old one)."""
    return (summary.get("environment") or {}).get("clocks")


def uncertainty_ms(clocks: Sequence[Mapping[str, Any]] | None) -> float | None:
    """Of an instant of one host against one of another, at worst; 0: one clock. None: not known."""
    if clocks is None or any(clock["uncertainty_ns"] is None for clock in clocks):
        return None
    each = sorted((clock["uncertainty_ns"] for clock in clocks), reverse=True)
    return sum(each[:2]) / 1e6


def clock_sentences(clocks: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if clocks is None:
        return []
    if not clocks:
        return ["One clock: all ranks' instants were read on one host."]
    worst = uncertainty_ms(clocks)
    shorter = "" if worst is None else f" Between hosts, what is shorter than {worst:.3f} ms means nothing."
    return [*(_told(clock) for clock in clocks[:-1]), _told(clocks[-1]) + shorter]


def _told(clock: Mapping[str, Any]) -> str:
    ranks, ns = ", ".join(map(str, clock["ranks"])), clock["uncertainty_ns"]
    whose = f"Clock of {clock['host']} (ranks {ranks})"
    if ns is None:
        return f"{whose}: not known against the server's, no round trip has come back."
    return (
        f"{whose}: {clock['offset_ns'] / 1e6:+.3f} ms was added, ± {ns / 1e6:.3f} ms "
        f"({clock['num_round_trips']} round trips, the quickest {clock['best_round_trip_ns'] / 1e6:.3f} ms)."
    )
