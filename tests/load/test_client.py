"""The client against a server that follows a script: what is counted as what, and from which instant."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from collections import Counter

import msgspec
import pytest
from scripted_server import CUT, DONE, END, HEAD, ScriptedServer, answer, piece, refusal, token, usage

from labkit.load.client import run_load
from labkit.load.lengths import Lengths
from labkit.load.schedule import make_schedule
from labkit.load.target import Target
from labkit.load.trial import ServerUnusable
from labkit.load.workload import Arrival, Part, Workload

STEADY = Workload(
    name="steady",
    title="8 in, 4 out",
    arrival=Arrival(process="constant", rate=50),
    parts=(Part(Lengths("constant", tokens=8), Lengths("constant", tokens=4)),),
)


def schedule(num_requests=5, **fields):
    return make_schedule(STEADY, num_requests=num_requests, **fields)


def load(script, plan=None, target=None, **options):
    """Runs `plan` against a server that follows `script`; (report, server). Asks as if it were our own."""

    async def go():
        async with ScriptedServer(script) as server:
            asked = Target(**{"url": server.url, "model": "m", "labkit": True, "timeout_s": 5.0, **(target or {})})
            return await run_load(asked, plan or schedule(), run_id="t", **options), server

    return asyncio.run(asyncio.wait_for(go(), 20))


def statuses(report):
    return dict(Counter(record.status for record in report.records))


def ms(later_ns, earlier_ns):
    return (later_ns - earlier_ns) / 1e6


def test_a_run_is_recorded_whole():
    report, server = load(lambda request: answer(4, 0.01))
    assert statuses(report) == {"completed": 5} and report.num_sent == 5 and report.num_cold == 0
    for index, record in enumerate(report.records):
        assert (record.index, record.n, record.prompt_tokens, record.asked_prompt_tokens) == (index, 4, 3, 8)
        assert record.scheduled_ns <= record.sent_ns < record.first_ns < record.last_ns <= record.end_ns
        assert record.chunk_tokens == [1] * 4 and record.asked_output_tokens == 4
    assert [record.request_id for record in report.records] == [f"t-{index}" for index in range(5)]
    assert report.window_end_ns == report.records[-1].scheduled_ns


def test_what_is_asked_is_what_was_planned():
    plan = schedule(3)
    _, server = load(lambda request: answer(4), plan, target={"token": "secret"})
    for request, planned in zip(server.requests, plan.requests, strict=True):
        assert request.path == "/v1/completions" and request.headers["authorization"] == "Bearer secret"
        assert request.headers["x-labkit-run"] == "t" and request.headers["x-request-id"] == f"t-{planned.index}"
        fields = request.fields
        assert fields["prompt"] == planned.prompt_ids.tolist() and fields["max_tokens"] == planned.max_tokens
        assert fields["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert fields["stream"] and fields["return_token_ids"] and fields["ignore_eos"] and fields["model"] == "m"


def test_requests_arrive_on_schedule():
    plan = make_schedule(msgspec.structs.replace(STEADY, arrival=Arrival(rate=60)), rate=60, num_requests=60, seed=2)
    report, server = load(lambda request: answer(1), plan)
    off_ms = sorted(
        ms(request.arrived_ns, record.scheduled_ns)
        for request, record in zip(server.requests, report.records, strict=True)
    )
    assert off_ms[0] >= 0 and off_ms[30] < 5
    assert report.offered_rate == pytest.approx(60, rel=0.02)


def test_a_stall_is_charged_to_everyone_who_was_due():
    """No coordinated omission: those due during a stall of 0.4 s are counted from their own instants."""
    began = []

    def script(request):
        began.append(time.monotonic())
        return [max(0.0, began[0] + 0.4 - time.monotonic()), *answer(1)]

    report, _ = load(script, schedule(6, rate=20.0))
    assert report.lateness.p50_ms < 20
    ttft = [ms(record.first_ns, record.scheduled_ns) for record in report.records]
    for index, wait in enumerate(ttft):
        assert wait == pytest.approx(400 - 50 * index, abs=40)


def test_a_late_send_is_counted_from_the_schedule_and_reported():
    """The loop is held up for 0.3 s: what was due then is late by the client's fault, and it says so."""

    async def go():
        async with ScriptedServer(lambda request: answer(1)) as server:
            target = Target(url=server.url, model="m", labkit=True)
            asyncio.get_running_loop().call_later(0.15, time.sleep, 0.3)
            return await run_load(target, schedule(20, rate=50.0))

    report = asyncio.run(go())
    worst = max(report.records, key=lambda record: record.sent_ns - record.scheduled_ns)
    assert ms(worst.sent_ns, worst.scheduled_ns) > 150
    assert ms(worst.first_ns, worst.scheduled_ns) >= ms(worst.sent_ns, worst.scheduled_ns)
    assert report.fell_behind and any("fell behind" in note for note in report.notes)
    assert report.lateness.max_ms == pytest.approx(ms(worst.sent_ns, worst.scheduled_ns), abs=0.01)


@pytest.mark.parametrize(
    ("steps", "status", "sentence", "n"),
    [
        (
            refusal(400, b'{"error": {"message": "prompt too long"}}'),
            "refused",
            "HTTP 400: prompt too long",
            0,
        ),
        (refusal(429, b"slow down"), "refused", "HTTP 429: slow down", 0),
        (refusal(503, b'{"detail": "restarting"}'), "failed", "HTTP 503: restarting", 0),
        (refusal(500, b""), "failed", "no reason given", 0),
        ([HEAD, piece(token()), piece(token()), CUT], "failed", "cut mid-stream", 2),
        ([HEAD, CUT], "failed", "cut before the first token", 0),
        ([CUT], "failed", "cut before the first token", 0),
        ([HEAD, piece(token()), END], "failed", "ended before the answer did", 1),
        ([HEAD, piece(b"hello"), END], "failed", "not a stream of events", 0),
        ([b"no http at all\r\n\r\n"], "failed", "not HTTP", 0),
        ([b"HTTP/1.1 307 X\r\nLocation: /v2\r\nContent-Length: 0\r\n\r\n"], "failed", "HTTP 307", 0),
    ],
)
def test_a_request_that_goes_wrong_is_counted_as_what_it_was(steps, status, sentence, n):
    report, _ = load(lambda request: list(steps), schedule(2))
    assert statuses(report) == {status: 2}
    for record in report.records:
        assert sentence in record.error and record.n == n and len(record.chunk_ns) == n and record.end_ns
        assert bool(record.first_ns) == bool(n)


def test_an_answer_that_ends_with_its_connection_is_whole():
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    steps = [head, token(), token(finish="length"), usage(3, 2), DONE, CUT]
    report, _ = load(lambda request: list(steps), schedule(3))
    assert statuses(report) == {"completed": 3} and all(record.n == 2 for record in report.records)


def test_what_takes_too_long_is_failed_and_its_tokens_kept():
    report, _ = load(lambda request: [HEAD, piece(token()), 3.0], schedule(2), target={"timeout_s": 0.4})
    assert statuses(report) == {"failed": 2}
    assert all("no end within 0.4 s" in record.error and record.n == 1 for record in report.records)
    assert all(300 < ms(record.end_ns, record.sent_ns) < 1500 for record in report.records)


def stopped_after(num_completed, script, plan):
    """Stops the run as soon as so many requests have been completed; (report, server)."""

    async def go():
        async with ScriptedServer(script) as server:
            stop, records = asyncio.Event(), []

            def settled(record):
                records.append(record)
                if len(records) == num_completed:
                    stop.set()

            target = Target(url=server.url, model="m", labkit=True)
            report = await run_load(target, plan, settled, stop=stop)
            await asyncio.sleep(0.3)
            return report, server

    return asyncio.run(asyncio.wait_for(go(), 20))


def test_a_stopped_run_accounts_for_every_request_of_its_schedule():
    """30 in a second and a half, stopped in the middle: some done, some cancelled (also there), the rest unsent."""
    report, server = stopped_after(3, lambda request: answer(4, 0.1), schedule(30, rate=20.0))
    counts = statuses(report)
    assert sum(counts.values()) == 30 and set(counts) == {"completed", "cancelled", "unsent"}
    assert [record.index for record in report.records] == list(range(30))
    unsent = [record for record in report.records if record.status == "unsent"]
    assert all(record.sent_ns == 0 and record.scheduled_ns > 0 for record in unsent)
    assert len(server.requests) == 30 - len(unsent) == report.num_sent
    assert server.num_gone == counts["cancelled"]


def test_answers_are_waited_for_only_so_long():
    script = lambda request: [HEAD, piece(token()), 5.0]  # noqa: E731
    report, _ = load(script, schedule(3), drain_s=0.3)
    assert statuses(report) == {"cancelled": 3} and all(record.n == 1 for record in report.records)


def test_a_closed_loop_keeps_its_number_in_flight():
    report, _ = load(lambda request: answer(2, 0.02), schedule(12, concurrency=3))
    assert statuses(report) == {"completed": 12} and report.concurrency == 3
    spans = sorted((record.sent_ns, record.end_ns) for record in report.records)
    in_flight = [sum(start <= at < end for start, end in spans) for at, _ in spans]
    assert max(in_flight) == 3
    assert all(record.scheduled_ns <= record.sent_ns for record in report.records)


def test_warm_up_is_flagged_and_outside_the_window():
    report, _ = load(lambda request: answer(1), schedule(10, rate=50.0), num_warmup=4)
    assert [record.warmup for record in report.records] == [True] * 4 + [False] * 6
    assert report.window_start_ns == report.records[4].scheduled_ns
    report, _ = load(lambda request: answer(1), schedule(10, rate=50.0), warmup_s=0.09)
    assert [record.warmup for record in report.records].count(True) == 4
    assert report.window_start_ns == report.start_ns + 90_000_000


def test_more_requests_than_warm_connections_are_all_served():
    plan = make_schedule(STEADY, rate=400.0, num_requests=200)
    report, _ = load(lambda request: answer(1, 0.3), plan)
    assert statuses(report) == {"completed": 200}


def test_a_connection_closed_while_it_rested_costs_no_request():
    """The server shuts each connection after one answer unannounced; the next request takes another."""
    script = lambda request: [*answer(1), 0.02, CUT]  # noqa: E731
    report, _ = load(script, schedule(6, rate=5.0))
    assert statuses(report) == {"completed": 6}


def test_a_server_that_is_not_there_is_said_before_anything_is_sent():
    with pytest.raises(ServerUnusable, match="could not reach http://127.0.0.1:9.*Is the server running"):
        asyncio.run(run_load(Target(url="http://127.0.0.1:9", model="m"), schedule()))


# ---- servers that are not ours


def test_options_that_are_refused_are_given_up_one_by_one():
    def script(request):
        options = request.fields.get("stream_options", {})
        if "ignore_eos" in request.fields or "continuous_usage_stats" in options:
            return refusal(400, b'{"error": {"message": "extra fields not permitted"}}')
        return answer(4)

    report, server = load(script, target={"labkit": False})
    assert statuses(report) == {"completed": 5}
    assert (report.options["usage"], report.options["continuous_usage"], report.options["ignore_eos"]) == (
        True,
        False,
        False,
    )
    assert not any("return_token_ids" in request.fields for request in server.requests)


def test_a_server_that_refuses_everything_is_quoted():
    with pytest.raises(ServerUnusable, match="HTTP 404: no such model"):
        load(lambda request: refusal(404, b'{"detail": "no such model"}'), target={"labkit": False})


def test_a_model_that_is_not_named_is_asked_for():
    def script(request):
        if request.path == "/v1/models":
            return refusal(200, b'{"data": [{"id": "theirs"}]}')
        return answer(1)

    report, server = load(script, target={"labkit": False, "model": ""})
    assert server.requests[-1].fields["model"] == "theirs" and statuses(report) == {"completed": 5}


def text_server(tokens_per_word, overhead):
    """Counts a prompt as so many tokens a word, and a template's tokens."""

    def script(request):
        fields = request.fields
        text = fields["messages"][0]["content"] if "messages" in fields else fields["prompt"]
        steps = answer(2)
        steps[-3] = piece(usage(round(len(text.split()) * tokens_per_word) + overhead, 2))
        return steps

    return script


@pytest.mark.parametrize("tokens_per_word", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_text_prompts_come_to_the_asked_number_of_tokens(tokens_per_word, endpoint):
    workload = msgspec.structs.replace(
        STEADY, parts=(Part(Lengths("constant", tokens=200), Lengths("constant", tokens=2)),)
    )
    target = {"labkit": False, "endpoint": endpoint, "prompt_mode": "text"}
    report, server = load(text_server(tokens_per_word, 12), make_schedule(workload, num_requests=3), target=target)
    assert all(abs(record.prompt_tokens - 200) <= 2 for record in report.records)
    assert server.requests[-1].path == ("/v1/chat/completions" if endpoint == "chat" else "/v1/completions")


def test_text_prompts_keep_their_shared_beginning():
    from labkit.load.target import Dialect, RequestWriter
    from labkit.load.workload import load_workload

    plan = make_schedule(load_workload("shared-prefix"), num_requests=40)
    writer = RequestWriter(Target(url="http://h", prompt_mode="text"), "t", "m", Dialect(words_per_token=0.25))
    same = [request for request in plan.requests if request.prefix_id == 0]
    words = [writer.text(request.prompt_ids).split() for request in same]
    assert len(words) > 3 and all(text[:128] == words[0][:128] for text in words)
    assert len({tuple(text) for text in words}) == len(words)


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "localhost:8000"},
        {"url": "http://h", "endpoint": "embeddings"},
        {"url": "http://h", "timeout_s": 0.0},
    ],
)
def test_a_target_that_makes_no_sense_is_refused(fields):
    with pytest.raises(ValueError):
        Target(**fields)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "/v1"),
        ("http://h:1/v1/", "/v1"),
        ("https://h/proxy", "/proxy/v1"),
        ("http://[::1]:8000", "/v1"),
    ],
)
def test_addresses_with_and_without_v1(url, base):
    assert Target(url=url).address().base == base


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_server_behind_tls_is_measured_alike_and_a_stranger_is_not_trusted(tmp_path):
    made = tmp_path / "cert.pem"
    subject = ["-subj", "/CN=lab", "-addext", "subjectAltName=IP:127.0.0.1"]
    making = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*making, "-keyout", str(tmp_path / "key.pem"), "-out", str(made)], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(made, tmp_path / "key.pem")

    async def go(ca_file):
        async with ScriptedServer(lambda request: answer(3, 0.01), tls) as server:
            target = Target(url=server.url, model="m", labkit=True, ca_file=ca_file)
            return await run_load(target, schedule(4))

    report = asyncio.run(go(str(made)))
    assert statuses(report) == {"completed": 4} and all(record.n == 3 for record in report.records)
    with pytest.raises(ServerUnusable, match="could not reach https://"):
        asyncio.run(go(""))
