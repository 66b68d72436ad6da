"""Jumped over or taken one at a time: the very same steps, order and instants."""

from __future__ import annotations

import random

import numpy as np
import pytest
from stepping import Affine, Stepping

from labkit.layout.deployment import read_layout
from labkit.plan.simulate import Options, SimRequest, simulate
from labkit.plan.work import EngineSettings


STATS = []
def _requests(draw: random.Random, count: int, sharing: bool, rate: float) -> list[SimRequest]:
    at, requests = 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        prompt, output = draw.randint(1, 150), draw.choice((1, 2, draw.randint(1, 40), draw.randint(20, 120)))
        ids: tuple[int, ...] = ()
        if sharing and draw.random() < 0.8:
            ids = tuple(range(1, draw.randint(1, 4))) + (draw.randint(5, 8),)
        requests.append(SimRequest(at, prompt, output, ids, 20))
    return requests


def _settings(draw: random.Random) -> EngineSettings:
    seqs = draw.choice((3, 8, 64))
    return EngineSettings(
        policy=draw.choice(("labkit", "vllm")),
        max_num_batched_tokens=draw.choice((64, 96, 512)),
        max_num_seqs=seqs,
        block_size=draw.choice((1, 4, 16)),
        enable_prefix_caching=draw.random() < 0.8,
    )


def _compare(requests, layout, cost, blocks, settings, policy="least-work", concurrency=0, shares=False):
    told = Stepping(requests, read_layout(layout), cost, blocks, settings, policy, concurrency).run()
    result = simulate(
        requests, read_layout(layout), cost, blocks, settings, concurrency=concurrency,
        options=Options(routing=policy, shares=shares, long_prompt_tokens=100),
    )  # fmt: skip
    assert set(result.refused) == told.refused
    assert {i: r for i, r in enumerate(result.replica.tolist()) if r >= 0} == told.replica
    assert result.num_preemptions == told.num_preemptions
    done = sorted(told.finished)
    assert np.flatnonzero(result.done).tolist() == done
    for got, expected in ((result.first_s, told.first), (result.finished_s, told.finished)):
        np.testing.assert_allclose(got[done], [expected[i] for i in done], rtol=0, atol=1e-9)
    assert result.num_steps == told.num_steps
    order = sorted(done, key=lambda i: (result.finished_s[i].round(8), i))
    assert order == sorted(done, key=lambda i: (round(told.finished[i], 8), i))
    STATS.append((told.num_preemptions, told.num_steps)); return told


@pytest.mark.parametrize("seed", range(60))
def test_one_replica_as_the_engine_would_step_it(seed):
    draw = random.Random(seed)
    settings = _settings(draw)
    sharing = draw.random() < 0.5
    requests = _requests(draw, 60, sharing, draw.choice((5.0, 30.0, 300.0)))
    tokens = draw.choice((300, 500, 2000))
    _compare(requests, "tp1", Affine(), tokens // settings.block_size, settings, shares=sharing or draw.random() < 0.2)


@pytest.mark.parametrize("seed", range(24))
def test_replicas_behind_the_engines_router(seed):
    draw = random.Random(1000 + seed)
    sharing = draw.random() < 0.5
    requests = _requests(draw, 80, sharing, draw.choice((30.0, 300.0)))
    settings = _settings(draw)
    policy = draw.choice(("least-work", "least-work", "round-robin", "prefix"))
    layout = draw.choice(("dp2", "dp3", "any:dp2,long:tp2"))
    blocks = draw.choice((400, 1000)) // settings.block_size
    _compare(requests, layout, Affine(), blocks, settings, policy, shares=sharing)


@pytest.mark.parametrize("seed", range(12))
def test_many_replicas_are_routed_as_by_the_engines_router(seed):
    draw = random.Random(2000 + seed)
    requests = _requests(draw, 300, False, draw.choice((300.0, 2000.0)))
    settings = EngineSettings("labkit", 96, 8, 16) if seed % 2 else EngineSettings("vllm", 512, 64, 4)
    _compare(requests, "dp16", Affine(), 600 // settings.block_size, settings)


@pytest.mark.parametrize("seed", range(12))
def test_a_closed_loop(seed):
    draw = random.Random(3000 + seed)
    requests = _requests(draw, 60, False, 1.0)
    settings = _settings(draw)
    layout = draw.choice(("tp1", "dp2"))
    _compare(requests, layout, Affine(), 600 // settings.block_size, settings, concurrency=draw.choice((1, 4, 20)))


@pytest.mark.parametrize("seed", range(16))
def test_replicas_in_lockstep(seed):
    draw = random.Random(4000 + seed)
    requests = _requests(draw, 60, False, draw.choice((30.0, 300.0)))
    settings = _settings(draw)
    _compare(requests, "dp3xep3", Affine(), 500 // settings.block_size, settings)


@pytest.mark.parametrize("seed", range(16))
def test_a_pool_that_prefills_and_one_that_decodes(seed):
    draw = random.Random(5000 + seed)
    requests = _requests(draw, 60, draw.random() < 0.3, draw.choice((30.0, 300.0)))
    settings = _settings(draw)
    layout = draw.choice(("prefill:tp1,decode:tp1", "prefill:dp2,decode:dp2"))
    _compare(requests, layout, Affine(), 600 // settings.block_size, settings)
