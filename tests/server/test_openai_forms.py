"""The OpenAI forms, against the shapes that vLLM answers with (key order and explicit nulls included)."""

from __future__ import annotations

from typing import Any

import pytest
from engine_double import Double, Script, completion

from labkit.engine.request import FinishReason

HELLO = list(b"hello")


# ---- whole answers


def test_completion_has_vllms_form(double: Double) -> None:
    body = completion(double, max_tokens=5)
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "total_tokens": 7,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_ids_go_in_and_come_out(double: Double) -> None:
    body = completion(double, prompt=[7, 300, 2047], max_tokens=3, return_token_ids=True)
    assert double.engine.submitted[0].prompt == (7, 300, 2047)
    assert body["choices"][0]["prompt_token_ids"] == [7, 300, 2047]
    assert body["choices"][0]["token_ids"] == list(b"hel")


@pytest.mark.parametrize("prompt", [["one"], [[111, 110, 101]], "one", [111, 110, 101]])
def test_a_prompt_is_text_or_ids_or_a_list_with_one(double: Double, prompt: Any) -> None:
    completion(double, prompt=prompt, max_tokens=1)
    assert double.engine.submitted[0].prompt == tuple(b"one")


def test_several_prompts_are_several_choices(double: Double) -> None:
    body = completion(double, prompt=["a", "bcd"], max_tokens=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == 4 and body["usage"]["completion_tokens"] == 4


def test_chat_has_vllms_form(double: Double) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    status, body = double.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 5})
    assert status == 200
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert double.engine.submitted[0].prompt == (256, 260, *b"hi", 257, 261)


def test_a_chat_without_max_tokens_may_fill_the_context(double: Double) -> None:
    double.engine.script.end = FinishReason.STOP
    double.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    request = double.engine.submitted[0]
    assert len(request.prompt) + request.params.max_tokens == 512


def test_models_and_health(double: Double) -> None:
    status, body = double.ask("GET", "/v1/models")
    card = body["data"][0]
    assert (status, body["object"], card["id"], card["object"]) == (200, "list", "lab-5m", "model")
    assert card["max_model_len"] == 512
    assert double.ask("GET", "/health") == (200, {"status": "ready"})


def test_sampling_parameters_reach_the_engine(double: Double) -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 7, "ignore_eos": True, "stop_token_ids": [3]}
    completion(double, max_tokens=1, stop="x", **asked)
    params = double.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 0, 7)
    assert params.ignore_eos and params.stop_token_ids == (3,) and params.stop == ("x",)


# ---- streams


def test_stream_chunks_have_vllms_form(double: Double) -> None:
    events = double.stream("/v1/completions", {"prompt": "hi", "max_tokens": 3})
    *chunks, done = events
    assert done == "[DONE]" and len(chunks) == 3
    for chunk in chunks:
        assert list(chunk) == ["id", "object", "created", "model", "choices"]
        assert list(chunk["choices"][0]) == [
            "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids",
        ]  # fmt: skip
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hel"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_stream_usage_and_ids(double: Double) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hi", "max_tokens": 3, "return_token_ids": True, "stream_options": options}
    *chunks, usage, done = double.stream("/v1/completions", body)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[104], [101], [108]]
    assert [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks] == [[104, 105], None, None]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert usage["choices"] == [] and usage["usage"] == {
        "prompt_tokens": 2,
        "total_tokens": 5,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_stream_names_the_role_first_and_counts_no_token_for_it(double: Double) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream_options": options}
    role, first, last, usage, done = double.stream("/v1/chat/completions", body)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["usage"]["completion_tokens"] == 0
    assert first["object"] == "chat.completion.chunk" and first["choices"][0]["delta"] == {"content": "h"}
    assert list(first["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "token_ids"]
    assert last["choices"][0]["finish_reason"] == "length" and last["choices"][0]["stop_reason"] is None
    assert usage["usage"]["completion_tokens"] == 2 and done == "[DONE]"


def test_half_a_character_is_an_empty_text_and_a_token(double: Double) -> None:
    double.engine.script = Script(token_ids=list("é".encode()))
    body = {"prompt": "hi", "max_tokens": 2, "return_token_ids": True}
    first, last, _ = double.stream("/v1/completions", body)
    assert (first["choices"][0]["text"], first["choices"][0]["token_ids"]) == ("", [0xC3])
    assert last["choices"][0]["text"] == "é"


def test_a_stream_of_several_prompts_marks_its_choices(double: Double) -> None:
    events = double.stream("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3})
    texts = {0: "", 1: ""}
    for chunk in events[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "hel", 1: "hel"} and events.count("[DONE]") == 1


def test_streamed_and_whole_answers_agree(double: Double) -> None:
    double.engine.script = Script(token_ids=[*"日本".encode(), 300, 257, 0xE6])
    fields = {"prompt": "hi", "max_tokens": 20, "return_token_ids": True, "stop": ["nowhere", "□zz"]}
    whole = completion(double, **fields)["choices"][0]
    chunks = double.stream("/v1/completions", fields)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert sum((chunk["choices"][0]["token_ids"] for chunk in chunks), []) == whole["token_ids"]
    assert len(whole["token_ids"]) == 20


# ---- stops


def test_text_is_cut_before_a_stop_string_that_spans_tokens(double: Double) -> None:
    body = completion(double, max_tokens=50, stop=["o w"], return_token_ids=True)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hell", "stop", "o w")
    assert bytes(choice["token_ids"]) == b"hello w" and body["usage"]["completion_tokens"] == 7
    assert len(double.engine.finished) == 1 and not double.engine.cancelled


def test_a_stream_never_shows_what_may_become_a_stop(double: Double) -> None:
    events = double.stream("/v1/completions", {"prompt": "hi", "max_tokens": 50, "stop": ["lo w", "xyz"]})
    shown = [chunk["choices"][0]["text"] for chunk in events[:-1]]
    assert shown == ["h", "e", "", "l", "", "", ""]
    assert events[-2]["choices"][0]["stop_reason"] == "lo w"


def test_a_held_beginning_is_shown_when_the_answer_ends_without_the_stop(double: Double) -> None:
    assert completion(double, max_tokens=4, stop=["lob"])["choices"][0]["text"] == "hell"


def test_the_token_that_ends_an_answer_is_counted_and_has_no_text(double: Double) -> None:
    double.engine.script = Script(token_ids=[*HELLO, 33], end=FinishReason.STOP)
    body = completion(double, max_tokens=50, stop_token_ids=[33])
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", 33)
    assert body["usage"]["completion_tokens"] == 6


# ---- logprobs


def test_completion_logprobs(double: Double) -> None:
    logprobs = completion(double, max_tokens=3, logprobs=2)["choices"][0]["logprobs"]
    assert list(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert logprobs["tokens"] == ["h", "e", "l"] and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "A": -1.5}


def test_streamed_logprobs_continue_their_offsets(double: Double) -> None:
    events = double.stream("/v1/completions", {"prompt": "hi", "max_tokens": 3, "logprobs": 0})
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in events[:-1]]
    assert offsets == [[0], [1], [2]]


def test_chat_logprobs(double: Double) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    _, answer = double.ask("POST", "/v1/chat/completions", body)
    assert answer["choices"][0]["logprobs"]["content"] == [
        {
            "token": "h",
            "logprob": -0.5,
            "bytes": [104],
            "top_logprobs": [
                {"token": "h", "logprob": -0.5, "bytes": [104]},
                {"token": "A", "logprob": -1.5, "bytes": [65]},
            ],
        }
    ]


def test_tokens_can_be_named_by_id(double: Double) -> None:
    body = completion(double, max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:104"]
