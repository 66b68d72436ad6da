"""A straggler and a slow link, each put in by a known amount, and what the recorder says of them.

The straggler sleeps before each sum over ranks of one layer. The link's rate is shaped between two emulated nodes; what
a sum of S bytes over two ranks sends through it each way is S (half of it twice, in gloo's ring), in TCP segments of
1448 bytes that are 1514 on the wire.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from real_ranks import RealRanks

from labkit.engine.core import EngineSettings
from labkit.engine.messages import Fault
from labkit.layout import Layout
from labkit.measure.recorder import OP_CODES, PREFILL, RING_DTYPE
from labkit.model.spec import load_spec

MODEL, LAYER, DELAY_S, LONG_S = "lab-5m", 3, 0.005, 0.025
SPEC = load_spec(MODEL)
PROMPT_TOKENS = 1024
BYTES_A_TOKEN = SPEC.hidden_size * 4
WIRE = 1514 / 1448
SETTINGS = EngineSettings(
    layout=Layout.parse("tp2"), memory_per_rank=2**27, prefix_cache=False, max_num_batched_tokens=PROMPT_TOKENS
)
_ALL_REDUCE = OP_CODES["all_reduce"]


def rows_of(ranks: RealRanks, *asked: tuple[list[int], int]) -> NDArray[np.void]:
    """The rows of collectives of these prompts, one after another."""
    ranks.steps()
    ranks.events.clear()
    for prompt, max_tokens in asked:
        ranks.run(ranks.tokens(prompt, max_tokens))
    assert ranks.steps()
    return np.concatenate([event["rows"] for event in ranks.events if event["event"] == "collectives"])


def sums(rows: NDArray[np.void], rank: int, layer: int | None = None) -> NDArray[np.void]:
    """The all-reduces inside the layers, as the rank has them."""
    mine = rows[(rows["op"] == _ALL_REDUCE) & (rows["rank"] == rank) & (rows["layer"] >= 0)]
    return mine if layer is None else mine[mine["layer"] == layer]


def decoded(ranks: RealRanks, delay_s: float, num_tokens: int) -> NDArray[np.void]:
    """Rows of decode steps, while rank 1 comes so late to each sum of LAYER."""
    ranks.pool.send(1, Fault("delay", delay_s, LAYER))
    rows = rows_of(ranks, ([5, 6, 7], num_tokens))
    ranks.pool.send(1, Fault("delay"))
    return rows[rows["phase"] != PREFILL]


def medians_us(rows: NDArray[np.void]) -> tuple[float, float]:
    """Wait and transfer."""
    wait, transfer = (np.median(rows[f"{what}_ns"]) / 1e3 for what in ("wait", "transfer"))
    return float(wait), float(transfer)


def ring_of(rows: NDArray[np.void], rank: int, ahead_ns: int) -> bytes:
    """What the rank itself wrote, by a clock so far ahead."""
    mine = rows[rows["rank"] == rank]
    ring = np.zeros(len(mine), RING_DTYPE)
    for name in RING_DTYPE.names or ():
        ring[name] = mine[name]
    ring["enter_ns"] += ahead_ns
    ring["exit_ns"] += ahead_ns
    return ring.tobytes()


def prefills(ranks: RealRanks, count: int, num_tokens: int) -> NDArray[np.void]:
    rows = rows_of(ranks, *[([first + 1] * num_tokens, 1) for first in range(count)])
    assert set(sums(rows, 0)["bytes"]) == {num_tokens * BYTES_A_TOKEN}
    return rows


def through_the_link_us(num_tokens: int, bits_per_s: int) -> float:
    """What was put in."""
    return num_tokens * BYTES_A_TOKEN * WIRE * 8 / bits_per_s * 1e6
