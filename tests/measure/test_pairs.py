"""Pairs of ranks and curves from a link whose figures are known: what is measured must be what was put in."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from labkit.engine.bench_messages import Benched, BenchLink
from labkit.layout import Layout
from labkit.layout.fabrics import group_fabrics
from labkit.measure.collectives import BOTH_PLACES, PINGPONG
from labkit.measure.link_bench import CURVE_SIZES, CurveGroup, LinkBench, curve_fits, curve_groups
from labkit.measure.pairs import (
    LARGEST_BYTES,
    LONGEST_WAY_S,
    PROBE_BYTES,
    SMALL_BYTES,
    large_bytes,
    num_rounds,
    pair_row,
    pairs_of,
    way_ns,
)

LINKS = {"shm": (10_000.0, 10.0), "gloo": (50_000.0, 0.025)}
"""α in ns and bytes a nanosecond (GB/s) one way."""


class MadeLinks:
    """Ranks whose every message takes exactly α + bytes ÷ β, and that remember what they were asked."""

    def __init__(self, num_ranks: int, wrong: int = 0) -> None:
        self.asked: list[BenchLink] = []
        self._num_ranks, self._wrong = num_ranks, wrong

    async def ask(self, message: BenchLink) -> Mapping[int, Benched]:
        self.asked.append(message)
        return {rank: Benched(message.epoch, rank, *self._part(message, rank)) for rank in range(self._num_ranks)}

    def _part(self, message: BenchLink, rank: int) -> tuple[list[int], int]:
        if rank not in message.ranks or (message.op == PINGPONG and rank != message.ranks[0]):
            return [], 0
        alpha_ns, per_ns = LINKS[message.fabric]
        way = alpha_ns + message.num_bytes / per_ns
        return [round(2 * way if message.op == PINGPONG else way)] * message.num_rounds, self._wrong


def test_a_message_s_way_is_half_of_there_and_back() -> None:
    assert way_ns([20_000, 24_000, 90_000]) == 12_000
    with pytest.raises(ValueError, match="no message came back"):
        way_ns([])
    row = pair_row(0, 3, [20_000, 24_000, 90_000], [2_000_000], 4_000_000, wrong=0, fabric="shm")
    assert (row["latency_us"], row["time_us"], row["bandwidth_gb_s"]) == (12, 1000, 4)
    assert row["latency_p90_us"] == pytest.approx(38.4) and (row["a"], row["b"], row["n"]) == (0, 3, 1)


def test_every_two_ranks_once() -> None:
    assert pairs_of(4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def test_a_large_message_is_as_large_as_the_link_carries_in_time() -> None:
    assert large_bytes(100.0, "cpu") == LARGEST_BYTES["cpu"], "a fast link gets the largest"
    slow_ns = PROBE_BYTES / 0.025
    size = large_bytes(slow_ns, "cpu")
    assert size / 0.025 <= LONGEST_WAY_S * 1e9 < 4 * size / 0.025
    assert large_bytes(1e12, "cpu") == PROBE_BYTES, "never smaller than the probe"


def test_rounds_fill_a_budget_within_bounds() -> None:
    assert [num_rounds(each, 0.1) for each in (0.0, 0.01, 1.0)] == [20, 10, 3]


def test_the_links_of_two_nodes_are_found_again() -> None:
    ranks = MadeLinks(4)
    seen = []
    rows = asyncio.run(LinkBench(ranks.ask).pairs(4, "shm", [0, 0, 1, 1], seen.append))
    assert rows == seen and [(row["a"], row["b"]) for row in rows] == pairs_of(4)
    for row in rows:
        across = (row["a"] < 2) != (row["b"] < 2)
        assert (row["fabric"], row["spans_nodes"]) == (("gloo", True) if across else ("shm", False))
        alpha_ns, per_ns = LINKS[row["fabric"]]
        assert row["latency_us"] == pytest.approx((alpha_ns + SMALL_BYTES / per_ns) / 1e3, rel=1e-3)
        assert row["bandwidth_gb_s"] == pytest.approx(row["bytes"] / (alpha_ns + row["bytes"] / per_ns), rel=1e-3)
    assert not any(row["wrong"] for row in rows)
    serials = [message.serial for message in ranks.asked]
    assert len(set(serials)) == len(serials), "a wire's name must never come twice"


def test_wrong_elements_are_added_up() -> None:
    (row,) = asyncio.run(LinkBench(MadeLinks(2, wrong=1).ask).pairs(2, "shm", []))
    assert row["wrong"] == 4, "one in each of the four questions"


def test_a_curve_grows_until_a_round_takes_too_long_and_its_line_is_the_link() -> None:
    bench = LinkBench(MadeLinks(4).ask)
    fast, slow = CurveGroup("tp", (0, 1), "shm"), CurveGroup("pp", (1, 3), "gloo", True)
    rows = [row for group in (fast, slow) for op in ("all_reduce", "sendrecv")
            for row in asyncio.run(bench.curve(group, op))]  # fmt: skip
    sizes = {fabric: [row["bytes"] for row in rows if row["fabric"] == fabric and row["op"] == "sendrecv"]
             for fabric in ("shm", "gloo")}  # fmt: skip
    assert sizes["shm"] == CURVE_SIZES["cpu"]
    assert all(row["in_place"] == (row["op"] in BOTH_PLACES) for row in rows)
    for line in curve_fits(rows):
        alpha_ns, per_ns = LINKS[line["fabric"]]
        assert line["alpha_us"] == pytest.approx(alpha_ns / 1e3, rel=0.01)
        assert line["gb_per_s"] == pytest.approx(per_ns, rel=0.01)
    assert {(line["axis"], line["fabric"], line["op"]) for line in curve_fits(rows)} == {
        (axis, fabric, op) for axis, fabric in (("tp", "shm"), ("pp", "gloo")) for op in ("all_reduce", "sendrecv")
    }


def test_a_very_slow_link_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINKS, "gloo", (50_000.0, 0.001))
    rows = asyncio.run(LinkBench(MadeLinks(2).ask).curve(CurveGroup("tp", (0, 1), "gloo"), "all_reduce"))
    assert [row["bytes"] for row in rows] == CURVE_SIZES["cpu"][: len(rows)] and len(rows) == 6
    assert rows[-1]["n"] == 3, "few rounds where each is long"


def test_the_end_asks_nobody_to_take_part() -> None:
    ranks = MadeLinks(2)
    asyncio.run(LinkBench(ranks.ask).end())
    assert ranks.asked[0].ranks == []


def groups_of(slug: str, nodes: list[int]) -> list[dict[str, object]]:
    return [vars(group) for group in group_fabrics(Layout.parse(slug), "shm", nodes)]


def chosen(slug: str, num_ranks: int, nodes: list[int]) -> list[tuple[str, tuple[int, ...], str]]:
    found = curve_groups(groups_of(slug, nodes), num_ranks, "shm", nodes)
    return [(group.axis, group.ranks, group.fabric) for group in found]


def test_one_curve_for_each_size_and_fabric_and_the_slow_fabric_beside() -> None:
    assert chosen("tp2", 2, []) == [("tp", (0, 1), "shm"), ("tp", (0, 1), "gloo")]
    assert chosen("dp2xtp2", 4, []) == [("tp", (0, 1), "shm"), ("tp", (0, 1), "gloo")]
    assert chosen("pp2xtp2", 4, [0, 0, 1, 1]) == [("pp", (0, 2), "gloo"), ("tp", (0, 1), "shm")]
    assert chosen("tp1", 4, []) == [("world", (0, 1, 2, 3), "shm"), ("world", (0, 1, 2, 3), "gloo")]
    assert chosen("tp1", 4, [0, 0, 1, 1]) == [("world", (0, 1, 2, 3), "gloo")]
    assert chosen("tp1", 1, []) == []
