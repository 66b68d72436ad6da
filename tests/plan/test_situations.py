"""Five situations, each in its layout, and the way there."""

from __future__ import annotations

from functools import cache

import pytest

from labkit.plan.advise import Advice
from labkit.plan.rank_places import FAST, INSIDE
from labkit.plan.situations import SITUATIONS, Situation

BY_CODE = {one.code: one for one in SITUATIONS}
ENDS = {
    "queue": ("dp2xtp2", "queue", "dp"),
    "long-inputs": ("pcp2xtp2", "compute", "pcp"),
    "one-answer": ("tp4", "memory bandwidth", "tp"),
    "kv": ("dcp", "KV memory", "dcp"),
    "pairs": ("pp2xtp2", "KV memory", "pp"),
}


@cache
def advised(code: str) -> Advice:
    return BY_CODE[code].advise(verify=False)


@pytest.mark.parametrize("code", ENDS)
def test_a_situation_ends_in_its_layout_by_the_axis_whose_job_it_is(code: str):
    layout, resource, axis = ENDS[code]
    found = advised(code)
    assert found.chosen is not None
    assert found.limit.resource == resource
    assert layout in found.chosen.layout.slug
    answers = {question.code: question.answer for question in found.walk}
    assert answers[axis] == "yes"
    assert axis in found.jobs


def test_what_comes_after_the_axis_that_settles_it_is_not_asked():
    found = advised("queue")
    codes = [question.code for question in found.walk]
    after = [question.answer for question in found.walk[codes.index("dp") + 1 : -1]]
    assert after and set(after) == {"not asked"}


def test_two_fast_pairs_keep_tensor_parallelism_inside_a_pair():
    found = advised("pairs")
    assert found.places is not None
    reach = {place.axis: (place.reach, place.link) for place in found.places.axes}
    assert reach["tp"] == (FAST, "nvlink-pairs")
    assert reach["pp"][0] == INSIDE
    assert not found.places.problem
    assert [row["gpu"] for row in found.places.ranks if row["pp"] == 0] == [0, 1]


def test_the_simulator_agrees_with_what_was_chosen():
    found = BY_CODE["queue"].advise()
    assert found.chosen is not None and found.chosen.verified is not None
    assert found.chosen.verified["does"]
    assert found.chosen.layout.slug == "dp2xtp2"


def test_a_situation_is_a_value():
    one = BY_CODE["kv"]
    assert isinstance(one, Situation)
    assert one.demand.concurrency == 64


def test_every_axis_of_the_chosen_layout_has_its_checks():
    names = {
        "tp": {"fit", "communication", "work per rank"},
        "pp": {"enough requests", "stage balance", "activation buffers"},
        "dp": {"memory", "routing", "admission"},
        "pcp": {"crossover"},
        "dcp": {"resident tokens", "TPOT"},
    }
    seen = set()
    for code in BY_CODE:
        found = advised(code)
        for axis in found.jobs:
            assert {check.name for check in found.checks if check.axis == axis} == names[axis]
            seen.add(axis)
    assert seen == set(names)
