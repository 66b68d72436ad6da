"""Who holds the ranks: leases, the queue, switches, and what a run takes with it when it ends."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from engine_double import Double, wait_until

from labkit.server.client import ServerError


def describe(double: Double) -> dict[str, Any]:
    return double.client.state()


def test_a_lease_holds_and_gives_back(own_double: Double) -> None:
    client = own_double.client
    with client.lease("run1", client="ann", purpose="a test", expected_s=5) as lease:
        holder = describe(own_double)["holder"]
        assert (holder["client"], holder["purpose"], holder["run_id"]) == ("ann", "a test", "run1")
        assert lease.switched is None
    assert describe(own_double)["holder"] is None
    assert lease.outcome["lease"] == "released" and not lease.lost


def test_a_lease_brings_its_layout_and_settings(own_double: Double) -> None:
    lines: list[str] = []
    settings = {"router": "prefix", "memory_per_rank": "64MiB"}
    with own_double.client.lease(
        "r", layout="TP2", settings=settings, on_line=lambda line: lines.append(line["lease"])
    ) as lease:
        assert lease.switched is not None and lease.switched["layout"] == "tp2"
    assert lines[:2] == ["switching", "granted"]
    settings_now = own_double.engine.settings
    assert settings_now.router == "prefix" and settings_now.memory_per_rank == 64 << 20


def test_a_second_lease_waits_in_line_and_sees_who_and_how_long(own_double: Double) -> None:
    lines: list[dict[str, Any]] = []
    order: list[str] = []

    def second() -> None:
        with own_double.client.lease("second", client="bob", on_line=lines.append):
            order.append("second")

    with own_double.client.lease("first", client="ann", purpose="a long run", expected_s=40):
        thread = threading.Thread(target=second)
        thread.start()
        wait_until(lambda: lines)
        queued = lines[0]
        assert (queued["lease"], queued["position"]) == ("queued", 1)
        assert queued["holder"]["client"] == "ann" and 35 < queued["eta_s"] <= 40
        assert "ann holds the ranks for a long run" in queued["message"]
        assert [entry["client"] for entry in describe(own_double)["queue"]] == ["bob"]
        order.append("first")
    thread.join(5)
    assert order == ["first", "second"] and describe(own_double)["holder"] is None


def test_the_queue_is_first_come_first_served(own_double: Double) -> None:
    order: list[int] = []
    threads = []

    def one(number: int) -> None:
        with own_double.client.lease(f"run{number}", expected_s=10):
            order.append(number)

    with own_double.client.lease("holder"):
        for number in range(3):
            threads.append(threading.Thread(target=one, args=(number,)))
            threads[-1].start()
            wait_until(lambda: len(describe(own_double)["queue"]) == len(threads))
        etas = [entry["eta_s"] for entry in describe(own_double)["queue"]]
        assert etas == [0, 10, 20]
    for thread in threads:
        thread.join(5)
    assert order == [0, 1, 2]


def test_a_connection_that_breaks_gives_the_ranks_back(own_double: Double) -> None:
    body = {"client": "ann", "run_id": "r1"}
    with own_double.open("POST", "/lab/lease", body) as response:
        assert b"granted" in response.readline()
        assert describe(own_double)["holder"]["run_id"] == "r1"
    wait_until(lambda: describe(own_double)["holder"] is None)


def test_one_who_leaves_the_queue_is_forgotten(own_double: Double) -> None:
    with own_double.client.lease("first"):
        with own_double.open("POST", "/lab/lease", {"client": "bob", "run_id": "second"}) as response:
            assert b"queued" in response.readline()
        wait_until(lambda: not describe(own_double)["queue"])


def test_a_runs_requests_end_with_its_lease(own_double: Double) -> None:
    own_double.engine.script.delay_s = 0.01
    body = {"prompt": "hi", "max_tokens": 400, "stream": True}
    headers = {"X-Labkit-Run": "r1", "X-Request-Id": "r1-0"}
    with own_double.client.lease("r1"):
        request = own_double.open("POST", "/v1/completions", body, headers)
        response = request.__enter__()
        response.read(5)
        with own_double.open("POST", "/v1/completions", body, {"X-Request-Id": "foreign"}) as other:
            other.read(5)
            own_double.client.release("r1")
            assert b'"finish_reason":"abort"' in response.read()
            assert own_double.engine.cancelled == ["r1-0"]
        request.__exit__(None, None, None)
    status, answer = own_double.ask("POST", "/v1/completions", body, headers)
    assert status == 409 and "has ended" in answer["error"]["message"]


def test_requests_of_others_are_served_and_counted(own_double: Double) -> None:
    with own_double.client.lease("r1") as lease:
        own_double.client.complete("hi", max_tokens=1)
        own_double.ask("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 1}, {"X-Labkit-Run": "r1"})
        own_double.client.complete("hi", max_tokens=1)
        assert describe(own_double)["holder"]["foreign_requests"] == 2
    assert lease.foreign_requests == 2


def test_a_switch_is_refused_while_others_hold_the_ranks(own_double: Double) -> None:
    client = own_double.client
    with client.lease("r1", client="ann", purpose="a run"):
        with pytest.raises(ServerError, match="ann holds the ranks for a run") as refused:
            client.switch("tp2")
        assert refused.value.status == 409
        report = client.switch("tp2", run_id="r1", probe=False)
    assert report == {"layout": "tp2", "ready_s": 0.1, "parts": {"load": 0.05}, "first_token_s": None}


def test_a_free_switch_measures_its_first_token(own_double: Double) -> None:
    report = own_double.client.switch("dp2", router="round-robin")
    assert report["layout"] == "dp2" and 0 < report["first_token_s"] < 2
    probe = own_double.engine.submitted[0]
    assert len(probe.prompt) == 128 and probe.params.temperature == 0
    assert describe(own_double)["holder"] is None


def test_two_switches_at_once_do_not_mix(own_double: Double) -> None:
    own_double.engine.script.delay_s = 0.3
    refusals: list[ServerError] = []

    def first() -> None:
        own_double.client.switch("tp2", client="ann", probe=False)

    thread = threading.Thread(target=first)
    thread.start()
    wait_until(lambda: describe(own_double)["holder"])
    try:
        own_double.client.switch("dp2", client="bob", probe=False)
    except ServerError as error:
        refusals.append(error)
    thread.join(5)
    assert len(refusals) == 1 and "ann holds the ranks for a switch to tp2" in str(refusals[0])


@pytest.mark.parametrize(
    ("layout", "settings", "words"),
    [
        ("tp3", {}, "ranks"),
        ("tp", {}, "tp"),
        ("tp2", {"rooter": "prefix"}, "did you mean 'router'?"),
        ("tp2", {"router": "random"}, "round-robin"),
        ("tp2", {"max_num_seqs": "many"}, "takes int"),
        ("tp2", {"memory_per_rank": "lots"}, "256MiB"),
        ("tp2", {"block_size": 0}, "at least 1"),
    ],
)
def test_what_is_not_possible_is_refused_before_anybody_waits(
    double: Double, layout: str, settings: dict[str, Any], words: str
) -> None:
    for path in ("/lab/switch", "/lab/lease"):
        body: dict[str, Any] = {"layout": layout, "settings": settings}
        if path == "/lab/lease":
            body |= {"client": "ann", "run_id": "never"}
        status, answer = double.ask("POST", path, body)
        assert status == 400 and words in answer["error"]["message"], answer
    assert not double.engine.switched and describe(double)["holder"] is None


def test_a_switch_that_the_ranks_refuse_ends_the_lease_with_the_sentence(own_double: Double) -> None:
    own_double.engine.switch_error = ValueError("rank 1 needs 90 MB and has 64.")
    with pytest.raises(ServerError, match="needs 90 MB"), own_double.client.lease("r1", layout="tp2"):
        raise AssertionError("the lease was granted")
    wait_until(lambda: describe(own_double)["holder"] is None)


@pytest.mark.parametrize("run_id", ["", "../../etc", "a b"])
def test_a_run_id_must_be_able_to_name_a_folder(double: Double, run_id: str) -> None:
    status, answer = double.ask("POST", "/lab/lease", {"client": "ann", "run_id": run_id})
    assert status == 400 and "run's id" in answer["error"]["message"]


def test_a_run_id_is_used_once(own_double: Double) -> None:
    with own_double.client.lease("r1"):
        pass
    with pytest.raises(ServerError, match="take a new run_id"), own_double.client.lease("r1"):
        pass


def test_drills_reach_the_rank(double: Double) -> None:
    double.client.fault(1, "delay", seconds=0.5, layer=2)
    rank, message = double.engine.faults[0]
    assert (rank, message.kind, message.seconds, message.layer) == (1, "delay", 0.5, 2)
    for rank, kind in ((7, "raise"), (0, "explode")):
        with pytest.raises(ServerError):
            double.client.fault(rank, kind)


# ---- events


def collect(double: Double, into: list[dict[str, Any]], **wanted: Any) -> Any:
    stream = double.client.events(into.append, **wanted)
    wait_until(lambda: double.service.hub.num_subscribers)
    return stream


def test_events_begin_with_the_state_and_follow_leases(own_double: Double) -> None:
    events: list[dict[str, Any]] = []
    with collect(own_double, events), own_double.client.lease("r1", client="ann", layout="tp2"):
        wait_until(lambda: any(event["event"] == "switch" for event in events))
        assert events[0]["event"] == "state" and events[0]["model"] == "lab-5m"
        leases = [event for event in events if event["event"] == "lease"]
        assert leases[0]["holder"]["client"] == "ann"


def test_a_watcher_sees_the_kinds_and_the_run_that_it_asked_for(own_double: Double) -> None:
    events: list[dict[str, Any]] = []
    with collect(own_double, events, kinds=["request"], run_id="mine"):
        for run_id in ("other", "mine"):
            event = {
                "event": "request", "request_id": f"{run_id}-0", "run_id": run_id, "output_tokens": 2,
                "prompt_tokens": 3, "cached_tokens": 0, "num_preemptions": 0, "finish_reason": "stop",
                "received_ns": 1, "first_end_ns": 2, "last_end_ns": 3,
            }  # fmt: skip
            own_double.loop.call_soon_threadsafe(own_double.service.on_event, event)
        wait_until(lambda: events)
        time.sleep(0.05)
    assert [event["request_id"] for event in events] == ["mine-0"]


def test_an_unknown_kind_is_refused(double: Double) -> None:
    status, answer = double.ask("GET", "/lab/events?kinds=steps,stepz")
    assert status == 400 and "'stepz'" in answer["error"]["message"]


def test_a_watcher_learns_that_the_server_went(own_double: Double) -> None:
    ends: list[str] = []
    stream = own_double.client.events(lambda event: None, on_end=ends.append)
    wait_until(lambda: own_double.service.hub.num_subscribers)
    own_double.client.shutdown()
    wait_until(lambda: ends)
    stream.close()
    assert "server has" in ends[0]


# ---- the server's own end


def test_a_server_leaves_when_its_last_client_has(tmp_path: Any) -> None:
    double = Double(tmp_path, linger_s=0.4)
    with double.client.lease("r1"):
        time.sleep(0.8)
        assert not double.ended.is_set()
    for _ in range(3):  # a monitor that asks for ever is no client
        assert double.client.health() == "ready"
        time.sleep(0.05)
    assert double.ended.wait(1)


# ---- a first layout that was refused


def refused_start(double: Double) -> None:
    double.loop.call_soon_threadsafe(double.service.started, "lab-5m does not fit on rank 0.")
    wait_until(lambda: double.client.health() == "failed")
    with pytest.raises(ServerError, match="does not fit on rank 0"):
        double.client.complete("hi", max_tokens=1)


def test_a_switch_mends_a_first_layout_that_was_refused(own_double: Double) -> None:
    refused_start(own_double)
    own_double.engine.switch_error = ValueError("rank 1 needs 90 MB and has 64.")
    with pytest.raises(ServerError, match="needs 90 MB"):
        own_double.client.switch("tp2", probe=False)
    assert "does not fit" in describe(own_double)["message"]
    own_double.engine.switch_error = None
    assert own_double.client.switch("tp2")["first_token_s"] > 0
    state = describe(own_double)
    assert (state["state"], state["message"], own_double.client.health()) == ("ready", "", "ready")
    assert own_double.client.complete("hi", max_tokens=1)["choices"]


def test_a_lease_mends_it_too_even_with_the_settings_that_were_refused(own_double: Double) -> None:
    refused_start(own_double)
    with own_double.client.lease("r1", layout=own_double.engine.settings.layout.slug):
        assert own_double.client.complete("hi", max_tokens=1)["choices"]
    assert len(own_double.engine.switched) == 1
