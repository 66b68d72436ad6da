"""The door: what a group records, with which tags, and that a group of one rank is free."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from labkit.measure.recorder import AXIS_CODES, OPS, PREFILL, group_id, merge
from labkit.parallel.comm import Group
from labkit.parallel.mesh import single_rank_mesh
from tests.parallel import on_ranks
from tests.parallel.team import Team


def test_every_call_leaves_one_row_with_its_tags(team: Team) -> None:
    for rank, (rows, num_unrecorded) in enumerate(team.run(on_ranks.recorded, ranks=(0, 1))):
        ops = [OPS[op] for op in rows["op"]]
        assert ops[:7] == [
            "all_reduce", "all_gather", "reduce_scatter", "gather", "broadcast", "all_to_all", "barrier",
        ]  # fmt: skip
        assert ops[7:] == [["send", "send"], ["recv"]][rank], "the call, and the wait for it"
        assert rows["bytes"].tolist() == [32, 32, 32, 32, 32, 64, 0, *[[32, 0], [32]][rank]]
        assert rows["seq"][:7].tolist() == list(range(7))
        assert set(rows["seq"][7:]) == {1 << 20}, "both ends number what passes from rank 0 to rank 1 alike"
        assert set(rows["group_id"]) == {group_id("tp", 5)} and set(rows["axis"]) == {AXIS_CODES["tp"]}
        assert set(rows["layer"]) == {3} and set(rows["phase"]) == {PREFILL}
        assert (rows["exit_ns"] >= rows["enter_ns"]).all()
        assert (np.diff(rows["enter_ns"]) > 0).all()
        assert num_unrecorded == 0


def test_a_straggler_is_wait_on_the_others_and_not_transfer(team: Team) -> None:
    """A drill that delays rank 1 in layer 1 by 30 ms.

    The shared clock tells the late neighbour from the slow link.
    """
    pieces = []
    for rank, (rows, _) in enumerate(team.run(on_ranks.straggle, 0.03, ranks=(0, 1))):
        pieces.append((rank, int(rows["enter_ns"][0]), int(rows["exit_ns"][-1]), rows.tobytes()))
    merged = merge(pieces).rows
    waited = {(int(row["rank"]), int(row["layer"])): int(row["wait_ns"]) for row in merged}
    assert waited[0, 1] > 25e6
    assert waited[1, 1] < 5e6
    assert max(waited[rank, layer] for rank in (0, 1) for layer in (0, 2)) < 25e6


def test_a_group_of_one_is_free_and_leaves_no_row() -> None:
    mesh = single_rank_mesh()
    x = torch.arange(6.0).view(2, 3)
    tp = mesh.tp
    assert tp.all_reduce(x) is x and tp.all_gather(x) is x and tp.reduce_scatter(x) is x
    assert tp.broadcast(x, 0) is x and tp.gather(x) == [x] and tp.all_to_all([x]) == [x]
    tp.barrier()
    assert mesh.door.drain() == b""


def test_a_group_of_several_needs_a_wire() -> None:
    with pytest.raises(ValueError, match="needs a wire"):
        Group(0, 2, "tp", (0, 1))


def test_sending_to_oneself_or_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="name another rank of the group"):
        single_rank_mesh().tp.isend(torch.ones(1), 0)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("reduce_scatter", "length 5 over 2 ranks, which does not divide"),
        ("all_to_all", "takes 2 parts, got 1"),
        ("irecv", "name another rank"),
    ],
)
def test_a_call_that_cannot_work_says_why_before_anyone_waits(call: str, sentence: str) -> None:
    class Nowhere:
        """A wire that must not be reached."""

    group = Group(0, 2, "tp", (0, 1), wire=Nowhere())  # type: ignore[arg-type]
    x = torch.ones(5)
    with pytest.raises(ValueError, match=sentence):
        {
            "reduce_scatter": lambda: group.reduce_scatter(x),
            "all_to_all": lambda: group.all_to_all([x]),
            "irecv": lambda: group.irecv(x, 2),
        }[call]()
