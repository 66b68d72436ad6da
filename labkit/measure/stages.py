"""What a pipeline's stages did: how busy each was, which one holds the others up, what lay between them.

A stage's ranks work on a step together, so its time for a step is its slowest rank's; the slowest stage sets
the pace of all. Idle is the rest of the window: bubbles inside steps (waiting for the stage before) and the
time without a step are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.layout import Layout
from labkit.measure.metrics import Window
from labkit.measure.recorder import AXIS_CODES, OP_CODES
from labkit.measure.records import StepRecord

_PP, _SEND, _RECV = AXIS_CODES["pp"], OP_CODES["send"], OP_CODES["recv"]


class InFlight:
    """The hidden states of one replica's steps between stages: sent, and not received yet."""

    def __init__(self) -> None:
        self._under_way = np.zeros((0, 3), np.int64)

    def most_bytes(self, rows: NDArray[np.void]) -> int:
        """The most bytes that were under way at an instant when this step (its merged rows) sent some.

        Steps come in the order in which they ran; what earlier ones still had under way counts too.
        """
        mine = _transfers(rows)
        if not len(mine):
            return 0
        known = np.concatenate([self._under_way, mine])
        begins = mine[:, 0][:, None]
        under_way = (known[:, 0] <= begins) & (known[:, 1] > begins)
        self._under_way = known[known[:, 1] > mine[:, 0].min()]
        return int((under_way * known[:, 2]).sum(axis=1).max())


def _transfers(rows: NDArray[np.void]) -> NDArray[np.int64]:
    """[transfers, (sent at, received at, bytes)] of a step's stage boundaries."""
    ours = rows[(rows["axis"] == _PP) & (rows["bytes"] > 0)]
    keys = ours["group_id"].astype(np.int64) << 32 | ours["seq"]
    sent, received = ours["op"] == _SEND, ours["op"] == _RECV
    _, at_send, at_receive = np.intersect1d(keys[sent], keys[received], return_indices=True)
    sends, receives = ours[sent][at_send], ours[received][at_receive]
    return np.stack([sends["enter_ns"], receives["exit_ns"], sends["bytes"]], axis=1).astype(np.int64)


def stage_figures(
    steps: Sequence[StepRecord], window: Window, layout: Layout, first_rank: int = 0
) -> dict[str, Any] | None:
    """Each stage's shares of the window and its time a step, the slowest one, and the activations in flight.

    None without a pipeline, or without a step in the window. A step counts where it ended. Replicas are taken
    together: a stage is the ranks of all of them that hold the same layers.
    """
    inside = [step for step in steps if window.start_ns <= step.end_ns <= window.end_ns]
    if layout.pp == 1 or not inside:
        return None
    stages = [_stage(inside, window, layout, stage, first_rank) for stage in range(layout.pp)]
    busy = [stage["busy_ms_per_step"] for stage in stages]
    return {
        "stages": stages,
        "slowest_stage": int(np.argmax(busy)),
        "slowest_over_mean": max(busy) / float(np.mean(busy)) if any(busy) else None,
        "activation_bytes_in_flight": max(step.in_flight_bytes for step in inside),
    }


def _stage(
    steps: Sequence[StepRecord], window: Window, layout: Layout, stage: int, first_rank: int
) -> dict[str, Any]:
    ranks = [first_rank + rank for rank in range(layout.world_size) if layout.coords(rank).pp == stage]
    busy_ns = np.array([_slowest(step, ranks) for step in steps])
    spent = {name: _sum(steps, ranks, f"{name}_ns") for name in ("compute", "wait", "transfer")}
    bubble, span = _sum(steps, ranks, "idle_ns"), (window.end_ns - window.start_ns) * len(ranks)
    shares = {name: total / span if span else 0.0 for name, total in spent.items()}
    return {
        "stage": stage,
        "ranks": ranks,
        "num_layers": layout.split[stage] if layout.split else None,
        **shares,
        "idle": max(0.0, 1.0 - sum(shares.values())),
        "bubble": bubble / span if span else 0.0,
        "busy_ms_per_step": float(busy_ns.mean()) / 1e6,
    }


def _slowest(step: StepRecord, ranks: Sequence[int]) -> int:
    """The longest that one of the stage's ranks was at work on the step."""
    at = [i for i, rank in enumerate(step.ranks) if rank in ranks]
    return max((step.compute_ns[i] + step.wait_ns[i] + step.transfer_ns[i] for i in at), default=0)


def _sum(steps: Sequence[StepRecord], ranks: Sequence[int], field: str) -> int:
    return sum(
        value
        for step in steps
        for rank, value in zip(step.ranks, getattr(step, field), strict=False)
        if rank in ranks
    )
