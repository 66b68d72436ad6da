"""`labkit plan` as a script and as a person sees it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from labkit.cli import app

ASKED = ["plan", "--model", "llama-3.1-8b", "--gpus", "2xrtx4090", "--workload", "512/128", "--ttft-p95-ms", "2000",
         "--tpot-p95-ms", "100", "--rate", "1", "--no-verify"]  # fmt: skip


def ran(*words: str):
    return CliRunner().invoke(app, list(words))


def test_json_is_one_line_with_the_keys():
    done = ran(*ASKED, "--json", "--price", "0.5")
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.strip().splitlines()
    found = json.loads(line)
    assert {"chosen", "walk", "checks", "layouts", "commands"} <= set(found)
    assert found["chosen"]["does"]


def test_a_person_reads_the_walk_the_checks_and_the_commands():
    done = ran(*ASKED)
    assert done.exit_code == 0, done.output
    for words in ("The walk", "Does one replica fit one GPU", "Chosen", "Checks before it is deployed", "vllm serve",
                  "Why not the others", "What to measure next"):  # fmt: skip
        assert words in done.stdout, words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan", "--gpus", "8xh200", "--workload", "chat", "--ttft-p95-ms", "1"], "Which model?"),
        ([*ASKED[:3], "--workload", "chat", "--ttft-p95-ms", "1"], "On which GPUs?"),
        ([*ASKED[:5], "--ttft-p95-ms", "1"], "Which traffic?"),
        ([*ASKED[:7], "--rate", "1"], "Nothing is asked"),
        ([*ASKED, "--engine", "lisp"], "--engine lisp is not known"),
        ([*ASKED, "--concurrency", "3"], "not both"),
        ([*ASKED, "--price", "-1"], "--price is -1"),
        (["plan", "--model", "nobody", *ASKED[3:]], "nobody"),
        (["plan", *ASKED[1:4], "8xabacus", *ASKED[5:]], "abacus"),
        ([*ASKED, "--run", "no-such-run"], "no-such-run"),
        ([*ASKED, "--layout", "tp3"], "tp3"),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(words: list[str], sentence: str):
    done = ran(*words)
    assert done.exit_code == 2, done.output
    assert sentence.lower() in done.output.lower()
    assert len(done.stderr.strip().splitlines()) == 1
