"""`labkit bench device` on real ranks: every rank's rates, alone and all at once, and a wrong copy is caught."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from labkit.lab.bench_device import DevicePlan, device_summary, measure_device

pytestmark = pytest.mark.engine
QUICK = {"num_bytes": 1 << 16, "side": 64, "num_warmup": 1, "num_rounds": 3}


def test_each_rank_is_measured_alone_and_with_the_others() -> None:
    plan = DevicePlan(num_ranks=2, **QUICK)
    rows = asyncio.run(measure_device(plan))
    expected = [(0, False), (1, False), (0, True), (1, True)]
    for work in (("copy", "float32"), ("matmul", "float32"), ("matmul", "bfloat16")):
        mine = [row for row in rows if (row["what"], row["dtype"]) == work]
        assert [(row["rank"], row["together"]) for row in mine] == expected
        assert all(row["rate"] > 0 and row["n"] == 3 and row["wrong"] == 0 for row in mine)
    assert all(row["in_cache"] for row in rows if row["what"] == "copy" and sys.platform == "linux")
    found = device_summary(plan, rows)
    assert found["copy_gb_s"]["together"] > 0 and set(found["gflop_s"]) == {"float32", "bfloat16"}


def test_a_wrong_copy_is_caught() -> None:
    rows = asyncio.run(measure_device(DevicePlan(module="tests.cluster.lying_device", **QUICK, dtypes=())))
    assert [row["wrong"] for row in rows] == [1]


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "labkit.cli", "bench", "device", "--device", "cpu", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_command_ends_with_one_json_line() -> None:
    done = ask("--buffer", "1MiB", "--side", "64", "--dtype", "float32", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert [(row["what"], row["size"]) for row in found["rows"]] == [("copy", 1 << 20), ("matmul", 64)]
    assert found["kept"] is (sys.platform != "linux"), "a buffer that fits the cache is no ceiling of memory"


def test_what_cannot_be_measured_is_one_sentence() -> None:
    done = ask("--rounds", "0")
    assert done.returncode == 2 and "measure 1 round or more" in done.stderr and len(done.stderr.splitlines()) == 1
    for given, sentence in [
        ({"dtypes": ("int3",)}, "'int3' is no dtype that is measured here"),
        ({"num_ranks": 0}, "measure 1 rank or more"),
        ({"side": 2}, "a side of 8 or more"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            DevicePlan(**given)
