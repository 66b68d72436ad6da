"""A plan for two pools that serve now."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from labkit.cli import app

ASKED = ["plan", "--model", "llama-3.1-8b", "--gpus", "4xh100", "--workload", "4000/256", "--rate", "2", "--json"]


def planned(*words: str):
    done = CliRunner().invoke(app, [*ASKED, *words])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_pools_that_meet_every_wish_stay():
    found = planned("--layout", "prefill:tp1,decode:tp1", "--ttft-p95-ms", "5000", "--tpot-p95-ms", "50")
    assert (found["chosen"]["layout"], found["chosen"]["kind"]) == ("prefill:tp1,decode:tp1", "as it is")
    assert [row["code"] for row in found["walk"]] == ["now", "pd"]
    assert found["chosen"]["verified"]["does"]
    assert {check["name"] for check in found["checks"] if check["axis"] == "pd"} >= {"transfer", "pools"}
    assert {"prefill", "decode"} <= {each["role"] for entry in found["commands"] for each in entry["commands"]}


def test_pools_that_do_not_are_told_and_left():
    found = planned("--layout", "prefill:tp1,decode:tp1", "--ttft-p95-ms", "150", "--tpot-p95-ms", "50",
                    "--no-verify")  # fmt: skip
    now = found["walk"][0]
    assert now["code"] == "now" and now["layout"] == "prefill:tp1,decode:tp1" and "TTFT" in now["sentence"]
    assert found["chosen"] is not None and found["chosen"]["layout"] != "prefill:tp1,decode:tp1"
    assert any(row["layout"] == "prefill:tp1,decode:tp1" and not row["does"] for row in found["layouts"])


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("prefill:tp1,prefill:tp1", "prefill"), ("prefill:tp3,decode:tp1", "TP"), ("prefill:tp8,decode:tp1", "needs 9"),
        ("decode:tp1", "prefill"),
    ],
)  # fmt: skip
def test_pools_that_cannot_serve_get_a_sentence(layout: str, sentence: str):
    done = CliRunner().invoke(app, [*ASKED, "--layout", layout, "--ttft-p95-ms", "300"])
    assert done.exit_code == 2 and sentence in done.stderr and "Traceback" not in done.stderr, done.output
