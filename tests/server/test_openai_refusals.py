"""What is refused, what breaks and who goes away: each with its status, its sentence, and nothing left running."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest
from engine_double import TOKEN, Double, completion, parse_events, refusal, wait_until

from labkit.server.client import ServerError

# ---- refusals


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"prompt": ""}, "at least one"),
        ({"prompt": []}, "at least one"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": {"a": 1}}, "must be text"),
        ({"prompt": [5, 2048]}, "Token id 2048 is not in the vocabulary: ids go from 0 to 2047"),
        ({"prompt": [-1]}, "Token id -1"),
        ({"n": 2}, "n=2 is not supported"),
        ({"echo": True}, "echo=true is not supported"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"logprobs": 21}, "between 0 and 20"),
        ({"stop": [""]}, "an empty string"),
        ({"max_token": 5}, "did you mean 'max_tokens'?"),
        ({"temperature": "hot"}, "wrong type"),
        ({"max_tokens": 600}, "context of lab-5m is 512 tokens"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported"),
    ],
)
def test_bad_input_gets_a_sentence(double: Double, fields: dict[str, Any], words: str) -> None:
    status, message = refusal(double, **{"prompt": "hi", **fields})
    assert status == 400 and words in message, message
    assert not double.engine.submitted


def test_neutral_values_of_unsupported_fields_pass(double: Double) -> None:
    completion(double, max_tokens=1, n=1, echo=False, presence_penalty=0.0, repetition_penalty=1.0, user="me")


def test_a_body_that_is_no_json_is_refused(double: Double) -> None:
    status, body = double.ask("POST", "/v1/completions", b"{nope")
    assert status == 400 and "JSON" in body["error"]["message"]


def test_an_unknown_model_is_404(double: Double) -> None:
    status, message = refusal(double, model="gpt-5", prompt="hi")
    assert status == 404 and "'lab-5m'" in message


def test_what_the_engine_refuses_is_400_with_its_sentence(double: Double) -> None:
    double.engine.script.refuse = "The prompt needs 40 blocks and the pool has 30."
    assert refusal(double, prompt="hi") == (400, "The prompt needs 40 blocks and the pool has 30.")


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_is_down_is_503(double: Double, stream: bool) -> None:
    double.engine.script.down = "Rank 0 exited."
    assert refusal(double, prompt="hi", stream=stream) == (503, "Rank 0 exited.")


def test_an_engine_that_goes_down_before_the_first_token_is_503(double: Double) -> None:
    double.engine.script.break_after = 0
    status, message = refusal(double, prompt="hi", stream=True)
    assert status == 503 and "Rank 1" in message


def test_an_engine_that_goes_down_in_a_stream_ends_it_with_an_error(double: Double) -> None:
    double.engine.script.break_after = 2
    events = double.stream("/v1/completions", {"prompt": "hi", "max_tokens": 9})
    assert len(events) == 4 and events[-1] == "[DONE]"
    assert events[-2]["error"] == {
        "message": "Rank 1 was killed (SIGKILL).",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }


# ---- clients that go away


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_request(double: Double, stream: bool) -> None:
    double.engine.script.hold = not stream
    double.engine.script.delay_s = 0.01
    body = {"prompt": "hi", "max_tokens": 400, "stream": stream}
    if stream:
        with double.open("POST", "/v1/completions", body, {"X-Request-Id": "gone"}) as response:
            response.read(10)
    else:
        with pytest.raises(ServerError, match="timed out"):
            double.client.complete("hi", max_tokens=400, timeout_s=0.2)
    wait_until(lambda: double.engine.submitted[0].id in double.engine.cancelled)
    double.engine.script.hold = False


def test_request_and_run_ids_travel(double: Double) -> None:
    headers = {"X-Request-Id": "run1-17", "X-Labkit-Run": "run1"}
    _, body = double.ask("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 1}, headers)
    request = double.engine.submitted[0]
    assert (request.id, request.run_id, body["id"]) == ("run1-17", "run1", "cmpl-run1-17")


def test_an_id_in_flight_is_not_used_twice(double: Double) -> None:
    double.engine.script.delay_s = 0.01
    body = {"prompt": "hi", "max_tokens": 300, "stream": True}
    with double.open("POST", "/v1/completions", body, {"X-Request-Id": "same"}) as response:
        response.read(10)
        status, answer = double.ask("POST", "/v1/completions", body, {"X-Request-Id": "same"})
        assert status == 400 and "'same'" in answer["error"]["message"]


def test_an_old_client_gets_its_stream_unchunked(double: Double) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 4, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    with socket.create_connection(("127.0.0.1", int(double.url.rpartition(":")[2])), timeout=10) as old:
        old.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: old.recv(4096), b""))
    events = parse_events(answer.partition(b"\r\n\r\n")[2])
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "hell" and events[-1] == "[DONE]"


def test_a_connection_is_kept_for_the_next_request(double: Double) -> None:
    connection = http.client.HTTPConnection(double.url.removeprefix("http://"), timeout=10)
    for _ in range(3):
        body = json.dumps({"prompt": "hi", "max_tokens": 3, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {TOKEN}"})
        assert len(parse_events(connection.getresponse().read())) == 4
    connection.close()
