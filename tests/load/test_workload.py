"""Workloads: what ships loads and fits the small model; what makes no sense is refused with a sentence."""

from __future__ import annotations

import math

import numpy as np
import pytest

from labkit.load.lengths import Lengths
from labkit.load.schedule import make_schedule
from labkit.load.workload import list_workloads, load_workload

SHIPPED = ["chat", "long-prompts", "mixed", "shared-prefix", "skewed-experts", "small-engines-256"]


def test_the_six_workloads_ship():
    assert list_workloads() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_workload_says_its_scale_and_fits_a_small_context(name):
    workload = load_workload(name)
    assert workload.name == name and workload.title and workload.scale
    schedule = make_schedule(workload, num_requests=200)
    assert max(len(request.prompt_ids) + request.max_tokens for request in schedule.requests) <= 2048
    assert min(len(request.prompt_ids) for request in schedule.requests) >= 1


def test_the_published_set_has_its_published_totals():
    schedule = make_schedule(load_workload("small-engines-256"))
    assert len(schedule.requests) == 256
    assert sum(len(request.prompt_ids) for request in schedule.requests) == 142_827
    assert sum(request.max_tokens for request in schedule.requests) == 133_966
    assert all(request.at_s == 0 for request in schedule.requests)
    assert schedule.temperature == 0.6 and schedule.ignore_eos


def test_skewed_prompts_are_made_of_the_given_ids_and_no_two_are_alike():
    workload = load_workload("skewed-experts")
    given = set(workload.parts[0].token_ids)
    schedule = make_schedule(workload, num_requests=100, vocab_size=2048)
    assert len(given) >= 4 and {int(token) for r in schedule.requests for token in r.prompt_ids} == given
    assert len({tuple(request.prompt_ids.tolist()) for request in schedule.requests}) == 100
    with pytest.raises(ValueError, match="vocabulary ends at 63"):
        make_schedule(workload, num_requests=1, vocab_size=64)


def test_the_published_set_is_not_scaled():
    with pytest.raises(ValueError, match="published set"):
        make_schedule(load_workload("small-engines-256"), length_scale=0.5)


def test_an_unknown_workload_lists_the_known_ones():
    with pytest.raises(FileNotFoundError, match=r"chat.*path of a \.toml"):
        load_workload("chta")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('name="x"\ntitle="x"\nparts=[]', "at least one"),
        ('name="x"\ntitle="x"\nspeed=3\nparts=[]', "speed"),
        ('name="x"\ntitle="x"\n[arrival]\nprocess="weibull"', "weibull"),
        ('name="x"\ntitle="x"\n[[parts]]\ntoken_ids=[7]\n[parts.prompt_tokens]\nshape="constant"\ntokens=3\n'
         '[parts.output_tokens]\nshape="constant"\ntokens=3', "two ids or more"),
        ("name=", "Invalid value"),
    ],
)
def test_a_file_that_is_not_understood_is_named_with_the_reason(tmp_path, text, sentence):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence) as caught:
        load_workload(path)
    assert "mine.toml" in str(caught.value)


def test_lognormal_lengths_have_their_median_and_sigma():
    lengths = Lengths("lognormal", median_tokens=1000, sigma=0.5)
    rng = np.random.default_rng(0)
    drawn = np.array([lengths.draw(rng) for _ in range(4000)])
    assert np.median(drawn) == pytest.approx(1000, rel=0.05)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.05)


def test_uniform_lengths_reach_both_ends_and_choices_follow_their_weights():
    rng = np.random.default_rng(0)
    uniform = Lengths("uniform", min_tokens=3, max_tokens=6)
    assert {uniform.draw(rng) for _ in range(200)} == {3, 4, 5, 6}
    choice = Lengths("choice", choices=(10, 20), weights=(3.0, 1.0))
    assert np.mean([choice.draw(rng) == 10 for _ in range(4000)]) == pytest.approx(0.75, abs=0.03)


def test_lengths_are_clipped_and_scaled():
    lengths = Lengths("lognormal", median_tokens=100, sigma=2.0, min_tokens=50, max_tokens=120)
    rng = np.random.default_rng(0)
    drawn = [lengths.draw(rng) for _ in range(500)]
    assert min(drawn) == 50 and max(drawn) == 120
    half = lengths.scaled(0.5)
    assert (half.median_tokens, half.min_tokens, half.max_tokens) == (50, 25, 60)


@pytest.mark.parametrize(
    "fields",
    [{"shape": "normal"}, {"shape": "constant"}, {"shape": "uniform", "min_tokens": 9, "max_tokens": 3}],
)
def test_lengths_that_make_no_sense_are_refused(fields):
    with pytest.raises(ValueError):
        Lengths(**fields)


def test_parts_come_in_their_proportions():
    schedule = make_schedule(load_workload("mixed"), num_requests=3000)
    share = np.mean([request.part == "long" for request in schedule.requests])
    assert share == pytest.approx(0.1, abs=3 * math.sqrt(0.1 * 0.9 / 3000))
