"""The whole way: HTTP to real ranks and back, on one server of two ranks that the module shares."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_server import RealServer, all_gone, wait_until

from labkit.measure.store import Store
from labkit.server.client import ServerError

pytestmark = pytest.mark.engine
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = "Parallel ranks: "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    options = ("--ranks", "2", "--memory-per-rank", "96MiB", "--max-model-len", "4000")
    server = RealServer(tmp_path_factory.mktemp("lab"), *options)
    yield server
    if server.process.poll() is None:
        server.end()


def ids_of(server: RealServer, prompt: Any = PROMPT, **fields: Any) -> list[int]:
    answer = server.client.complete(prompt, **{**GREEDY, "max_tokens": 24, **fields})
    return list(answer["choices"][0]["token_ids"])


def running(server: RealServer) -> int:
    return sum(replica["running"] + replica["waiting"] for replica in server.client.state()["replicas"])


def test_the_first_line_comes_before_the_ranks_and_requests_wait_for_them(server: RealServer) -> None:
    first = json.loads(server.first_line)
    assert set(first) == {"url", "token"} and first["url"].startswith("http://127.0.0.1:")
    assert server.client.health() in ("starting", "ready")
    assert len(ids_of(server, max_tokens=2)) == 2
    assert server.client.health() == "ready"


def test_streamed_and_whole_answers_are_the_same_tokens(server: RealServer) -> None:
    whole = server.client.complete(PROMPT, **GREEDY, max_tokens=24)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(server.client.stream(PROMPT, **GREEDY, max_tokens=24, stream_options=options))
    *tokens, usage = chunks
    assert sum((chunk["choices"][0]["token_ids"] for chunk in tokens), []) == whole["choices"][0]["token_ids"]
    assert "".join(chunk["choices"][0]["text"] for chunk in tokens) == whole["choices"][0]["text"]
    assert [chunk["usage"]["completion_tokens"] for chunk in tokens][-1] == 24
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 24


def test_text_and_its_ids_are_the_same_prompt(server: RealServer) -> None:
    assert ids_of(server) == ids_of(server, list(PROMPT.encode()))


def test_a_repeated_prompt_says_how_much_was_cached(server: RealServer) -> None:
    prompt = [(7 * i) % 256 for i in range(100)]
    first, again = (server.client.complete(prompt, **GREEDY, max_tokens=2) for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_a_stop_string_ends_the_request_in_the_engine(server: RealServer) -> None:
    text = server.client.complete(PROMPT, **GREEDY, max_tokens=24)["choices"][0]["text"]
    stop = text[5:7]
    answer = server.client.complete(PROMPT, **GREEDY, max_tokens=3000, stop=stop)
    choice = answer["choices"][0]
    assert choice["text"] == text[: text.find(stop)] and choice["stop_reason"] == stop
    assert answer["usage"]["completion_tokens"] < 24
    wait_until(lambda: running(server) == 0)


def test_logprobs_are_those_of_the_greedy_choice(server: RealServer) -> None:
    answer = server.client.complete(PROMPT, **GREEDY, max_tokens=6, logprobs=3, return_tokens_as_token_ids=True)
    choice = answer["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    for chosen, top in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert len(top) == 3 and chosen == max(top.values()) < 0


def test_a_seed_fixes_the_draw(server: RealServer) -> None:
    fields = {"temperature": 1.0, "seed": 11, "max_tokens": 16}
    assert ids_of(server, **fields) == ids_of(server, **fields) != ids_of(server, **{**fields, "seed": 12})


def test_concurrent_answers_are_those_given_alone(server: RealServer) -> None:
    prompts = [f"prompt number {i} " * (1 + i) for i in range(8)]
    alone = [ids_of(server, prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: ids_of(server, prompt), prompts))
    assert together == alone


def test_a_client_that_goes_away_frees_its_blocks(server: RealServer) -> None:
    stream = server.client.stream(PROMPT, **GREEDY, max_tokens=3500)
    next(stream)
    assert running(server) == 1
    stream.close()
    wait_until(lambda: running(server) == 0)
    wait_until(lambda: all(replica["kv_used_blocks"] == 0 for replica in server.client.state()["replicas"]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"max_tokens": 0}, "at least 1"), ({"max_tokens": 5000}, "4000"), ({"prompt": []}, "at least one token")],
)
def test_what_can_never_be_served_is_refused(server: RealServer, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ServerError, match=words) as refused:
        server.client.complete(**{"prompt": PROMPT, **fields})
    assert refused.value.status == 400 and running(server) == 0


def test_a_switch_from_the_shell_says_how_long_it_took(server: RealServer) -> None:
    before = ids_of(server)
    for layout in ("tp2", "dp2", "tp1"):
        ran = server.run("switch", layout)
        assert ran.returncode == 0, ran.stderr
        report = json.loads(ran.stdout)
        assert 0 < report["ready_s"] < report["first_token_s"] < 10
        assert server.client.state()["layout"] == layout and ids_of(server) == before


def test_a_layout_that_is_not_legal_is_refused_and_the_old_one_stands(server: RealServer) -> None:
    ran = server.run("switch", "tp3")
    assert ran.returncode == 2 and "Traceback" not in ran.stderr and "tp3" in ran.stderr.lower()
    assert server.client.state()["state"] == "ready"


def test_the_state_shows_who_holds_what(server: RealServer) -> None:
    server.client.switch("tp2", probe=False)
    state = server.client.state()
    assert [rank["rank"] for rank in state["ownership"]] == [0, 1]
    kinds = {(part["part"], part["kind"]) for rank in state["ownership"] for part in rank["parts"]}
    assert ("mlp", "partitioned") in kinds and ("norm", "replicated") in kinds
    assert state["environment"]["num_ranks"] == 2 and "torch" in state["environment"]["versions"]
    tp4 = next(entry for entry in state["layouts"] if entry["layout"] == "tp4")
    assert not tp4["legal"] and tp4["reason"]
    assert len(state["memory"]) == 2 and state["memory"][0]["weights"] > 0


def of_steps(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [entry for event in events if event["event"] == "steps" for entry in event[name]]


def test_a_run_leaves_its_steps_memory_and_collectives(server: RealServer) -> None:
    events: list[dict[str, Any]] = []
    with (
        server.client.events(events.append, run_id="r1"),
        server.client.lease("r1", layout="tp2", settings={"router": "round-robin"}) as lease,
    ):
        ids_of(server)
        wait_until(lambda: sum(step["num_decode_seqs"] for step in of_steps(events, "steps")) == 23)
    assert lease.outcome["store_error"] == "" and lease.foreign_requests == 1
    with Store(server.folder / "home" / "store.sqlite") as store:
        steps = store.step_records("r1")
        assert sum(step.num_decode_seqs for step in steps) == 23 and steps[0].prefill_tokens == len(PROMPT)
        assert set(store.memory("r1")["rank"]) == {0, 1}
        rows = store.collectives("r1")
        sums = rows[rows["op"] == "all_reduce"]
        told = [crossing for crossing in of_steps(events, "crossings") if crossing["op"] == "all_reduce"]
        assert len(sums) == sum(crossing["num"] for crossing in told) > 0
        assert sums["bytes"].sum() == sum(crossing["bytes"] for crossing in told)
        assert all(crossing["axis"] == "tp" and crossing["ranks"] == [0, 1] for crossing in told)
    assert (server.folder / "home" / "runs" / "r1" / "collectives.parquet").is_file()


def test_a_runs_requests_end_with_it(server: RealServer) -> None:
    fields = {"model": "lab-5m", "prompt": PROMPT, "max_tokens": 3500, **GREEDY}
    headers = {"X-Labkit-Run": "r2", "X-Request-Id": "r2-0"}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, server.client.lease("r2"):
        answer = pool.submit(ask_with, server, fields, headers)
        wait_until(lambda: running(server) == 1)
        server.client.release("r2")
        assert answer.result(20)["choices"][0]["finish_reason"] == "abort"
    assert running(server) == 0


def ask_with(server: RealServer, fields: dict[str, Any], headers: dict[str, str]) -> Any:
    import urllib.request

    url, token = server.client.url, server.client.token
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(fields).encode(), {"Authorization": f"Bearer {token}", **headers}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def test_a_killed_rank_is_named_and_the_pool_comes_back(server: RealServer) -> None:
    before = ids_of(server)
    failures: list[dict[str, Any]] = []
    with server.client.events(failures.append, kinds=["failure"]):
        stream = server.client.stream(PROMPT, **GREEDY, max_tokens=3500)
        next(stream)
        server.client.fault(1, "kill")
        with pytest.raises(ServerError, match=r"(?i)rank 1"):
            list(stream)
        wait_until(lambda: failures)
    assert failures[0]["rank"] == 1
    wait_until(lambda: server.client.health() == "ready", 40)
    assert ids_of(server) == before


def test_status_and_stop(server: RealServer) -> None:
    wait_until(lambda: server.client.health() == "ready", 40)
    assert "lab-5m" in server.run("status").stdout
    family = server.family()
    assert len(family) >= 2
    assert server.run("stop").returncode == 0
    assert server.process.wait(20) == 0
    wait_until(lambda: all_gone(family))
    left = [path.name for path in (server.folder / "runtime" / "labkit").iterdir()]
    assert left == [], left
    assert server.run("status").returncode == 2


# ---- ends


def test_ranks_end_when_the_server_is_killed(tmp_path: Path) -> None:
    server = RealServer(tmp_path, "--ranks", "1", "--memory-per-rank", "64MiB")
    wait_until(lambda: server.client.health() == "ready", 40)
    family = server.family()
    assert family
    runtime = server.folder / "runtime" / "labkit"
    assert list(runtime.glob("pool-*/start-1"))
    server.end(signal.SIGKILL)
    wait_until(lambda: all_gone(family), 10)
    wait_until(lambda: not list(runtime.glob("pool-*")))
    assert not list(Path("/dev/shm").glob(f"labkit-*-{server.process.pid}-*"))


def test_a_server_that_nobody_needs_leaves_even_while_it_starts(tmp_path: Path) -> None:
    server = RealServer(tmp_path, "--ranks", "2", LABKIT_LINGER_S="1.5")
    family = wait_until(server.family)
    assert server.process.wait(30) == 0
    wait_until(lambda: all_gone(family), 10)
    assert "nobody came for 1.5 s" in server.log.read_text()


def test_a_token_of_ones_own(tmp_path: Path) -> None:
    server = RealServer(tmp_path, "--ranks", "1", LABKIT_TOKEN="chosen")
    try:
        assert json.loads(server.first_line)["token"] == "chosen"
        file = tmp_path / "runtime" / "labkit" / "server.json"
        assert os.stat(file).st_mode & 0o777 == 0o600
    finally:
        assert server.end(signal.SIGINT) == 0
    assert not file.exists()
