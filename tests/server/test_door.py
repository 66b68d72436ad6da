"""Who may come in: the token, the Host header, and what is open to everybody."""

from __future__ import annotations

import pytest
from engine_double import TOKEN, Double

from labkit.server.app import host_name, is_loopback
from labkit.server.options import ServeOptions, make_plan

GUARDED = [
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/metrics"),
    ("GET", "/lab/state"),
    ("GET", "/lab/choices"),
    ("GET", "/lab/events"),
    ("POST", "/lab/lease"),
    ("POST", "/lab/switch"),
    ("POST", "/lab/fault"),
    ("POST", "/lab/links"),
    ("POST", "/lab/shutdown"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize("value", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN])
def test_nothing_is_told_without_the_token(double: Double, method: str, path: str, value: str) -> None:
    with double.open(method, path, {}, {"Authorization": value}) as response:
        assert response.status == 401
        assert b"token" in response.read() and response.headers["WWW-Authenticate"] == "Bearer"
    assert not double.stop.is_set()


def test_a_token_in_the_address_opens_no_endpoint(double: Double) -> None:
    status, _ = double.ask("GET", f"/lab/state?token={TOKEN}", headers={"Authorization": ""})
    assert status == 401


@pytest.mark.parametrize("path", ["/", f"/?token={TOKEN}", "/landing.css", "/landing.js", "/health"])
def test_the_landing_page_and_health_are_open_and_hold_no_secret(double: Double, path: str) -> None:
    with double.open("GET", path, headers={"Authorization": ""}) as response:
        assert response.status == 200 and TOKEN.encode() not in response.read()


def test_the_landing_page_loads_nothing_from_elsewhere(double: Double) -> None:
    for path in ("/", "/landing.css", "/landing.js"):
        with double.open("GET", path) as response:
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
            body = response.read().decode()
            assert "http://" not in body and "https://" not in body and "//cdn" not in body


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "0.0.0.0"])
def test_a_foreign_host_header_is_refused_even_with_the_token(double: Double, host: str) -> None:
    status, body = double.ask("GET", "/lab/state", headers={"Host": host})
    assert status == 403 and "--allow-host" in body["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:80", "[::1]:99", "127.8.8.8", "LAB.example:5", "me.localhost"]
)
def test_loopback_and_allowed_hosts_come_in(double: Double, host: str) -> None:
    assert double.ask("GET", "/lab/state", headers={"Host": host})[0] == 200


def test_host_names() -> None:
    assert host_name("[::1]:80") == "::1" and host_name("a:1") == "a" and host_name("") == ""
    assert not is_loopback("") and not is_loopback("10.0.0.1") and is_loopback("::1")


def test_a_way_that_does_not_exist_says_so(double: Double) -> None:
    status, body = double.ask("GET", "/v1/nowhere")
    assert status == 404 and "/v1/nowhere" in body["error"]["message"]
    status, body = double.ask("GET", "/v1/completions")
    assert status == 405 and "GET" in body["error"]["message"]


def test_links_are_listed_and_scripts_are_no_links(double: Double) -> None:
    double.client.set_links([{"title": "Labs", "url": "http://127.0.0.1:1/lab", "description": "Notebooks"}])
    assert double.client.state()["links"][0]["title"] == "Labs"
    status, _ = double.ask("POST", "/lab/links", {"links": [{"title": "x", "url": "javascript:alert(1)"}]})
    assert status == 400
    double.client.set_links([])


def test_other_machines_need_a_token_chosen_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_TOKEN", raising=False)
    options = ServeOptions(model="lab-5m", host="0.0.0.0", ranks=1)
    with pytest.raises(ValueError, match="set LABKIT_TOKEN"):
        make_plan(options)
    monkeypatch.setenv("LABKIT_TOKEN", "mine")
    assert make_plan(options).token == "mine"


def test_every_server_has_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_TOKEN", raising=False)
    options = ServeOptions(model="lab-5m", ranks=1)
    tokens = {make_plan(options).token for _ in range(3)}
    assert len(tokens) == 3 and min(map(len, tokens)) >= 32


def test_metrics_bear_vllms_names(double: Double) -> None:
    double.client.complete("hi", max_tokens=2)
    status, text = double.ask("GET", "/metrics")
    assert status == 200
    for line in ('labkit_num_requests_running{engine="0"} 2.0', 'labkit_kv_cache_usage_perc{engine="0"} 0.25'):
        assert line in text.decode()
    assert b"labkit_time_to_first_token_seconds_bucket" in text
