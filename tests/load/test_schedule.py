"""The schedule: its gaps' statistics, one schedule for a seed, prompts that repeat only on purpose."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest

from labkit.load.arrivals import unit_gaps
from labkit.load.schedule import make_schedule
from labkit.load.workload import Arrival, load_workload

CHAT = load_workload("chat")


def gaps(num, seed=0, **arrival):
    return np.array(list(itertools.islice(unit_gaps(Arrival(**arrival), np.random.default_rng(seed)), num)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_mean_one_and_their_variation(burstiness):
    drawn = gaps(20_000, process="gamma", burstiness=burstiness)
    assert drawn.mean() == pytest.approx(1.0, abs=4 / math.sqrt(burstiness * 20_000))
    assert drawn.std() / drawn.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_counts_have_the_variance_of_their_mean():
    arrivals = np.cumsum(gaps(20_000, process="poisson"))
    counts = np.bincount((arrivals / 10).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.12)


def test_constant_gaps_do_not_vary_and_a_burst_has_none():
    assert set(gaps(1000, process="constant")) == {1.0}
    assert set(gaps(1000, process="burst")) == {0.0}


@pytest.mark.parametrize("rate", [0.7, 20.0, 200.0])
def test_the_offered_rate_is_the_rate_asked_for(rate):
    schedule = make_schedule(CHAT, rate=rate, seconds=30, seed=5)
    assert len(schedule.requests) == round(rate * 30)
    assert len(schedule.requests) / schedule.requests[-1].at_s == pytest.approx(rate, rel=1e-9)
    times = [request.at_s for request in schedule.requests]
    assert times == sorted(times) and times[0] >= 0


def same(one, other):
    return (
        one.index == other.index
        and one.max_tokens == other.max_tokens
        and np.array_equal(one.prompt_ids, other.prompt_ids)
    )


def test_one_seed_gives_one_schedule_and_another_seed_another():
    first, again = (make_schedule(CHAT, rate=5, seconds=20, seed=3) for _ in range(2))
    other = make_schedule(CHAT, rate=5, seconds=20, seed=4)
    assert all(same(a, b) and a.at_s == b.at_s for a, b in zip(first.requests, again.requests, strict=True))
    assert not any(a.at_s == b.at_s for a, b in zip(first.requests[:-1], other.requests, strict=False))


def test_a_rate_stretches_time_and_changes_nothing_else():
    slow, fast = (make_schedule(CHAT, rate=rate, num_requests=50, seed=3) for rate in (2, 8))
    for a, b in zip(slow.requests, fast.requests, strict=True):
        assert same(a, b) and a.at_s == pytest.approx(4 * b.at_s)


def test_the_schedule_does_not_depend_on_its_length_or_on_having_an_end():
    short, long = (make_schedule(CHAT, rate=5, num_requests=num, seed=3).requests for num in (40, 700))
    endless = list(itertools.islice(make_schedule(CHAT, rate=5, seed=3).endless, 40))
    assert all(
        same(a, b) and same(a, c) and a.gap == b.gap == c.gap for a, b, c in zip(short, long, endless, strict=False)
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_the_shares_of_all_workers_are_the_schedule_once(num_workers):
    schedule = make_schedule(CHAT, rate=20, seconds=5, seed=3)
    shares = [schedule.share(worker, num_workers) for worker in range(num_workers)]
    merged = sorted(itertools.chain(*shares), key=lambda request: request.at_s)
    assert [request.index for request in merged] == [request.index for request in schedule.requests]
    assert all(a is b for a, b in zip(merged, schedule.requests, strict=True))


def test_a_worker_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="0..1"):
        make_schedule(CHAT, num_requests=3).share(2, 2)


def test_prompts_are_unique_within_a_run_and_between_runs_of_one_seed():
    one, two = (make_schedule(CHAT, num_requests=200, seed=1, run_id=run).requests for run in ("a", "b"))
    heads = {tuple(request.prompt_ids[:16].tolist()) for request in (*one, *two)}
    assert len(heads) == 400
    assert [len(a.prompt_ids) for a in one] == [len(b.prompt_ids) for b in two]
    assert [a.max_tokens for a in one] == [b.max_tokens for b in two]


def test_the_published_set_too_is_new_to_each_run():
    workload = load_workload("small-engines-256")
    one, two = (make_schedule(workload, run_id=run).requests for run in ("a", "b"))
    assert not any(np.array_equal(a.prompt_ids[:16], b.prompt_ids[:16]) for a, b in zip(one, two, strict=True))


def test_shared_prefixes_are_shared_within_the_run_only_and_popular_by_zipf():
    workload = load_workload("shared-prefix")
    one, two = (make_schedule(workload, num_requests=2000, seed=1, run_id=run).requests for run in ("a", "b"))
    prefixes = {}
    for request in one:
        prefixes.setdefault(request.prefix_id, set()).add(tuple(request.prompt_ids[:512].tolist()))
    assert len(prefixes) == 8 and all(len(ids) == 1 for ids in prefixes.values())
    assert len({tuple(request.prompt_ids.tolist()) for request in one}) == 2000
    assert not {ids for group in prefixes.values() for ids in group} & {tuple(r.prompt_ids[:512].tolist()) for r in two}
    counts = np.bincount([request.prefix_id for request in one])
    assert counts[0] / counts[7] == pytest.approx(8**0.8, rel=0.35)


def test_ids_stay_inside_the_vocabulary_and_a_tiny_one_is_refused():
    for vocab_size in (64, 2048):
        ids = np.concatenate(
            [r.prompt_ids for r in make_schedule(CHAT, num_requests=50, vocab_size=vocab_size).requests]
        )
        assert ids.min() >= vocab_size // 32 and ids.max() < vocab_size - vocab_size // 32
    with pytest.raises(ValueError, match="at least 64"):
        make_schedule(CHAT, num_requests=1, vocab_size=10)


def test_requests_are_cut_to_the_context_and_counted():
    schedule = make_schedule(load_workload("long-prompts"), num_requests=30, max_context=800)
    assert all(len(r.prompt_ids) + r.max_tokens <= 800 for r in schedule.requests)
    assert schedule.num_cut == sum(r.cut for r in schedule.requests) > 20
    assert make_schedule(CHAT, num_requests=30, max_context=8192).num_cut == 0


def test_lengths_scale_together():
    full, half = (make_schedule(CHAT, num_requests=300, length_scale=scale).requests for scale in (1.0, 0.5))
    ratio = sum(len(r.prompt_ids) for r in half) / sum(len(r.prompt_ids) for r in full)
    assert ratio == pytest.approx(0.5, rel=0.02)


def test_a_closed_loop_has_no_times():
    schedule = make_schedule(CHAT, concurrency=4, num_requests=10)
    assert schedule.rate == 0 and all(request.at_s == 0 for request in schedule.requests)


@pytest.mark.parametrize(
    "fields",
    [
        {"rate": 0.0},
        {"rate": -1.0},
        {"seconds": 0.0},
        {"num_requests": -3},
        {"concurrency": -1},
        {"max_context": 1},
    ],
)
def test_what_makes_no_sense_is_refused_with_the_value(fields):
    with pytest.raises(ValueError, match=str(next(iter(fields.values()))).rstrip("0").rstrip(".")):
        make_schedule(CHAT, **fields)


def test_a_burst_needs_a_number_of_requests():
    workload = msgspec.structs.replace(CHAT, arrival=Arrival(process="burst"))
    with pytest.raises(ValueError, match="num_requests"):
        make_schedule(workload, seconds=3)
    assert len(make_schedule(workload, num_requests=3).requests) == 3
