"""KV handed from any layout to any other: every element of the target's cache is that of the source's, none is touched
beside them."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from thread_ranks import ThreadWires

from labkit.engine.messages import Moved, MoveKV
from labkit.engine.mover import KVMover
from labkit.layout import Deployment, Layout, Slots, handoff_bytes, kv_heads, layers
from labkit.layout.deployment import Pool
from labkit.model.kv_cache import KVCache
from labkit.model.spec import load_spec
from labkit.parallel.comm import Door, Group

SPEC = replace(load_spec("lab-5m"), num_kv_heads=2)
LAYOUTS = ["tp1", "tp2", "tp4", "pp2", "tp4xdcp2", "pcp2", "pcp2xdcp2"]
BLOCK, NUM_BLOCKS, START, STOP = 6, 9, 6, 31
CPU = torch.device("cpu")


class Ranks:
    """The caches and movers of a deployment, in one process."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        wires, world = ThreadWires(), deployment.handoff_ranks
        self.caches, self.movers = {}, {}
        for rank in world:
            pool = deployment.pool_of(rank)
            local = rank - pool.first_rank
            mine = len(layers(pool.layout, SPEC, local)), len(kv_heads(pool.layout, SPEC, local))
            stored = Slots.of(pool.layout, BLOCK).stored
            cache = KVCache(mine[0], NUM_BLOCKS, mine[1], SPEC.head_dim, stored, torch.float32, CPU)
            wire, _ = wires.get("shm", world, rank, "handoff")
            group = Group(world.index(rank), len(world), "handoff", world, wire=wire, door=Door(recording=False))
            self.caches[rank] = cache
            self.movers[rank] = KVMover(group, rank, deployment, SPEC, BLOCK, cache, CPU)

    def places(self, pool: Pool, rank: int, table: np.ndarray, positions: np.ndarray):
        """(indices into the rank's memory, the positions that it stores) of some positions."""
        slots, local = Slots.of(pool.layout, BLOCK), rank - pool.first_rank
        mine = positions[slots.members(positions) == pool.layout.index_in("dcp", local)]
        return torch.from_numpy(slots.slots(mine, table)), mine

    def run(self, message: MoveKV) -> dict[int, Moved]:
        for mover in self.movers.values():
            mover.begin(message)
        answers: dict[int, Moved] = {}
        give_up = time.monotonic() + 20
        while len(answers) < len(self.movers) and time.monotonic() < give_up:
            for rank, mover in self.movers.items():
                for answer in mover.landed():
                    answers[rank] = answer
        return answers


def truth(pool: Pool, rank: int, positions: np.ndarray) -> torch.Tensor:
    """What the rank must hold: [layers, 2, heads, positions, head_dim], each element told apart from all others."""
    local = rank - pool.first_rank
    sizes = SPEC.num_layers, 2, SPEC.num_kv_heads, STOP, SPEC.head_dim
    whole = torch.arange(1, int(np.prod(sizes)) + 1, dtype=torch.float32).view(sizes)
    held = whole[list(layers(pool.layout, SPEC, local))][:, :, list(kv_heads(pool.layout, SPEC, local))]
    return held[:, :, :, torch.from_numpy(positions)]


@pytest.mark.parametrize(("source", "target"), list(product(LAYOUTS, LAYOUTS)))
def test_every_element_arrives_and_nothing_else_is_touched(source: str, target: str) -> None:
    deployment = Deployment.parse(f"prefill:{source},decode:{target}")
    ranks = Ranks(deployment)
    giving, taking = deployment.pools
    tables = np.array([7, 2, 5, 0, 8, 4], np.int32), np.array([1, 3, 8, 6, 0, 5], np.int32)
    everything, moving = np.arange(STOP), np.arange(START, STOP)
    for rank in giving.ranks:
        slots, mine = ranks.places(giving, rank, tables[0], everything)
        ranks.caches[rank].by_token()[:, :, :, slots] = truth(giving, rank, mine)
    message = MoveKV(1, 1, (0, 0), (1, 0), START, STOP, tables[0].tobytes(), tables[1].tobytes())
    answers = ranks.run(message)
    assert set(answers) == set(deployment.handoff_ranks)
    for rank in taking.ranks:
        slots, mine = ranks.places(taking, rank, tables[1], moving)
        expected = torch.zeros_like(ranks.caches[rank].by_token())
        expected[:, :, :, slots] = truth(taking, rank, mine)
        assert torch.equal(ranks.caches[rank].by_token(), expected)
    both = giving.layout, taking.layout
    whole = handoff_bytes(*both, SPEC, STOP, block_size=BLOCK, dtype_bytes=4)
    cached = handoff_bytes(*both, SPEC, START, block_size=BLOCK, dtype_bytes=4)
    assert sum(answer.sent_bytes for answer in answers.values()) == whole - cached


def test_nothing_to_move_is_answered_all_the_same() -> None:
    ranks = Ranks(Deployment.parse("prefill:tp2,decode:tp1"))
    table = np.array([1, 2], np.int32).tobytes()
    answers = ranks.run(MoveKV(1, 1, (0, 0), (1, 0), 12, 12, table, table))
    assert [answers[rank].sent_bytes for rank in (0, 1, 2)] == [0, 0, 0]


def test_several_moves_keep_their_order_and_a_mover_ends() -> None:
    ranks = Ranks(Deployment.parse("prefill:dp2,decode:tp1"))
    table = np.array([1, 2], np.int32).tobytes()
    for move_id, replica in ((1, 0), (2, 1), (3, 0)):
        message = MoveKV(1, move_id, (0, replica), (1, 0), 0, 12, table, table)
        for rank in (replica, 2):
            ranks.movers[rank].begin(message)
    done: list[int] = []
    give_up = time.monotonic() + 20
    while len(done) < 3 and time.monotonic() < give_up:
        done += [answer.move_id for answer in ranks.movers[2].landed()]
        for rank in (0, 1):
            ranks.movers[rank].landed()
    assert done == [1, 2, 3]
    for mover in ranks.movers.values():
        mover.close()
        assert not mover.is_busy


def test_what_goes_wrong_on_the_way_is_raised_by_the_ranks_own_thread() -> None:
    ranks = Ranks(Deployment.parse("prefill:tp1,decode:tp1"))
    table = np.array([1, 2], np.int32).tobytes()

    def lost(*_: object) -> None:
        raise ConnectionError("the link is down")

    ranks.movers[1]._group.irecv = lost  # type: ignore[method-assign]
    ranks.movers[1].begin(MoveKV(1, 1, (0, 0), (1, 0), 0, 12, table, table))
    with pytest.raises(ConnectionError, match="the link is down"):
        give_up = time.monotonic() + 5
        while time.monotonic() < give_up:
            ranks.movers[1].landed()


def test_layouts_of_the_sweep_are_legal_for_the_model() -> None:
    from labkit.layout import is_legal

    assert all(is_legal(Layout.parse(slug), SPEC) for slug in LAYOUTS)
