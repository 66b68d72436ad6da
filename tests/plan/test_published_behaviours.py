"""Behaviours that engines' pages publish come out right in sign and rough size."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from labkit.paths import repo_dir

FILE = repo_dir() / "benchmarks" / "published_behaviours.py"


def _bench():
    spec = importlib.util.spec_from_file_location("published_behaviours", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BENCH = _bench()
MAKERS = ("kv_starvation", "no_gain_without_nvlink", "gain_from_stages", "queue_cliff", "dcp_capacity",
          "expert_imbalance")  # fmt: skip


@pytest.mark.skipif(not BENCH.PUBLISHED.is_file(), reason="measured/published.csv does not lie beside the project")
@pytest.mark.parametrize("name", MAKERS)
def test_a_published_behaviour_comes_out_right(name: str):
    found = list(getattr(BENCH, name)(BENCH.PUBLISHED))
    assert found
    wrong = [f"{one.name}: published {one.published:.2f}, predicted {one.predicted:.2f} ({one.figures})"
             for one in found if not one.right]  # fmt: skip
    assert not wrong


def test_a_gain_of_the_wrong_size_is_not_called_right():
    made = BENCH._ratio("x", (100.0, 100.0), (1000.0, 210.0), "tokens/s", lambda gain: gain > 1, "a gain")
    assert not made.right
    assert BENCH._ratio("x", (100.0, 100.0), (200.0, 190.0), "tokens/s", lambda gain: gain > 1, "a gain").right


@pytest.mark.skipif(not BENCH.PUBLISHED.is_file(), reason="measured/published.csv does not lie beside the project")
def test_eight_gpus_over_pcie_do_no_more_than_four():
    assert next(iter(BENCH.no_gain_without_nvlink(BENCH.PUBLISHED))).predicted <= 1.1
