"""A measurement asked for over HTTP: refused in words, told as it goes, kept, and given up when nobody reads it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_double import Double, completion, wait_until

from labkit.layout import Layout
from labkit.server.client import ServerError
from labkit.server.fabric_store import FabricStore


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    yield tmp_path


def test_measured_told_and_kept(double: Double, home: Path) -> None:
    double.engine.settings = double.engine.settings.__class__(layout=Layout(tp=2))
    before = double.client.fabric()
    assert before["measured"] is None and before["machine"]["num_cores"] >= 1
    assert {m["op"] for m in before["messages"]} >= {"all_reduce"} and not any(m["time_us"] for m in before["messages"])

    lines: list[dict[str, Any]] = []
    found = double.client.measure_fabric(lines.append, client="a test")
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"], pair["wrong"]) == (0, 1, 0)
    assert pair["bandwidth_gb_s"] == pytest.approx(2, rel=0.01), "half of there and back"
    assert {(row["op"], row["fabric"]) for row in found["rows"]} == {
        (op, fabric)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv")
        for fabric in ("shm", "gloo")
    }
    after = double.client.fabric()
    assert after["measured"]["pairs"] == found["pairs"] and after["progress"] is None
    decode = next(m for m in after["messages"] if (m["phase"], m["op"]) == ("decode", "all_reduce"))
    assert decode["time_us"] == pytest.approx(1 + decode["bytes"] / 1e3, rel=0.01)
    assert len(list((home / "fabric").glob("*--tp2.json"))) == 1
    assert double.service.session.holder is None


def test_its_progress_is_an_event_for_everybody(double: Double) -> None:
    events: list[dict[str, Any]] = []
    with double.client.events(events.append, ["bench"]):
        wait_until(lambda: double.service.hub.num_subscribers)
        double.client.measure_fabric()
        wait_until(lambda: events and events[-1]["progress"] is None)
    told = [event["progress"] for event in events if event["progress"]]
    assert [each["done"] for each in told] == sorted(each["done"] for each in told)
    assert told[-1]["total"] >= told[-1]["done"] > 0 and {each["what"]["kind"] for each in told} == {"pairs", "curve"}


def test_whoever_holds_the_ranks_is_named(own_double: Double) -> None:
    with own_double.client.lease("r-1", client="Ada", purpose="a run"):
        with pytest.raises(ServerError, match="Ada holds the ranks for a run") as refused:
            own_double.client.measure_fabric()
        assert refused.value.status == 409
    assert own_double.client.fabric()["measured"] is None


def test_a_request_without_a_lease_refuses_it_too(own_double: Double) -> None:
    own_double.engine.script.hold = True
    asking = threading.Thread(target=completion, args=(own_double,), daemon=True)
    asking.start()
    wait_until(lambda: own_double.engine.submitted)
    with pytest.raises(ServerError, match="1 request runs, which a measurement would disturb"):
        own_double.client.measure_fabric()
    own_double.engine.script.hold = False
    asking.join(5)
    assert own_double.client.measure_fabric()["wrong"] == 0


def test_who_goes_away_ends_it_and_the_ranks_are_free(own_double: Double) -> None:
    own_double.engine.script.delay_s = 0.05
    with own_double.open("POST", "/lab/bench", {"client": "somebody"}) as response:
        assert b'"progress"' in response.readline()
        assert own_double.service.session.holder is not None
    wait_until(lambda: own_double.service.session.holder is None)
    assert own_double.client.fabric()["measured"] is None, "half a measurement is none"


def test_ranks_that_go_are_told(own_double: Double) -> None:
    own_double.engine.script.down = "Rank 1 was killed (SIGKILL)."
    with pytest.raises(ServerError, match="Rank 1 was killed"):
        own_double.client.measure_fabric()
    assert own_double.service.session.holder is None


def test_a_body_that_is_none_of_its_is_refused(double: Double) -> None:
    status, body = double.ask("POST", "/lab/bench", {"layout": "tp2"})
    assert status == 400 and "takes (client)" in body["error"]["message"]


def test_one_rank_has_nobody_to_send_to(tmp_path: Path) -> None:
    alone = Double(tmp_path, num_ranks=1)
    with pytest.raises(ServerError, match="--ranks 2 or more"):
        alone.client.measure_fabric()
    alone.close()


def test_what_is_kept_is_found_by_its_place_and_the_layout_s_own_first(tmp_path: Path) -> None:
    store = FabricStore(tmp_path / "fabric")
    place = {"host": "a/b", "backend": "gloo", "num_ranks": 2, "num_nodes": 1, "link": None}
    assert store.find({**place, "layout": "tp2"}) is None
    store.keep({**place, "layout": "tp2", "pairs": [1]})
    newest = store.keep({**place, "layout": "prefill:tp1,decode:tp1", "pairs": [2]})
    assert store.find({**place, "layout": "tp2"})["pairs"] == [1]  # type: ignore[index]
    assert store.find({**place, "layout": "dp2"})["pairs"] == [2], "else the newest"  # type: ignore[index]
    assert store.find({**place, "host": "other", "layout": "tp2"}) is None
    newest.write_text("{")
    assert store.find({**place, "layout": "dp2"})["pairs"] == [1], "a broken file is passed by"  # type: ignore[index]
