"""What bears a token, and what an answer was: the corner cases of streams, fed by hand."""

from __future__ import annotations

import pytest
from scripted_server import DONE, event, token, usage

from labkit.load.sse import AnswerStream, error_of_body


def read(*pieces, at=None):
    """Feeds pieces at 1, 2, 3 ... (or the given instants) and closes."""
    answer = AnswerStream()
    for number, data in enumerate(pieces):
        answer.feed(data, at[number] if at else number + 1)
    answer.close()
    return answer


def chat(content, usage_tokens=None, **fields):
    delta = {"content": content, **fields}
    more = {} if usage_tokens is None else {"usage": {"prompt_tokens": 3, "completion_tokens": usage_tokens}}
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}], **more)


def test_a_plain_stream():
    answer = read(token(), token(), token(finish="length"), usage(7, 3), DONE)
    assert (answer.chunk_ns, answer.chunk_tokens, answer.n) == ([1, 2, 3], [1, 1, 1], 3)
    assert (answer.prompt_tokens, answer.finish_reason, answer.failure()) == (7, "length", "")


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_pieces_may_be_cut_anywhere(size, newline):
    whole = b"".join([b": ping\n\n", token("é"), token("漢", "stop"), usage(2, 2), DONE]).replace(b"\n", newline)
    answer = read(*[whole[start : start + size] for start in range(0, len(whole), size)])
    assert (answer.chunk_tokens, answer.n, answer.failure()) == ([1, 1], 2, "")


def test_several_events_in_one_piece_arrive_at_once():
    assert read(token() + token() + token(finish="stop") + DONE, at=[9]).chunk_ns == [9, 9, 9]


def test_role_only_and_empty_chunks_bear_no_token():
    answer = read(chat("", role="assistant"), chat(None), chat(""), chat("hello"), DONE)
    assert (answer.chunk_ns, answer.n) == ([4], 1)


def test_reasoning_is_tokens_too():
    assert read(chat(None, reasoning_content="hm"), chat(None, reasoning="so"), DONE).n == 2


def test_running_usage_says_how_many_tokens_a_chunk_bears():
    answer = read(chat("", 0, role="assistant"), chat("a", 1), chat("bcde", 5), chat("", 5), usage(3, 5), DONE)
    assert (answer.chunk_ns, answer.chunk_tokens, answer.n) == ([2, 3], [1, 4], 5)
    assert not answer.estimated


def test_half_a_character_is_an_empty_text_and_a_token():
    with_usage = read(chat("", 1), chat("漢", 2), DONE)
    with_ids = read(token("", token_ids=[200]), token("漢", token_ids=[201], finish="length"), DONE)
    assert with_usage.chunk_ns == with_ids.chunk_ns == [1, 2]


def test_token_ids_count_and_an_empty_list_does_not():
    answer = read(token("", token_ids=[]), token("ab", token_ids=[1, 2]), token("", token_ids=[3], finish="stop"), DONE)
    assert (answer.chunk_tokens, answer.n) == ([2, 1], 3)


def test_bytes_that_are_no_utf8_are_still_a_chunk():
    broken = token("X").replace(b"X", b"\xe6\xbc")
    answer = read(broken, token(finish="stop"), DONE)
    assert (answer.n, answer.failure()) == (2, "")


def test_without_running_usage_the_servers_count_is_shared_out_by_text():
    answer = read(token("a"), token("bbbb"), token("cccc", "length"), usage(2, 9), DONE)
    assert answer.n == 9 == sum(answer.chunk_tokens)
    assert answer.chunk_tokens == [2, 3, 4] or answer.chunk_tokens == [2, 4, 3]
    assert answer.estimated


def test_n_is_the_servers_count_even_when_texts_were_more():
    assert read(token(), token(), token(finish="stop"), usage(2, 2), DONE).n == 2


def test_without_any_usage_n_is_what_was_seen():
    assert read(token(), token(finish="length"), DONE).n == 2


def test_an_answer_of_no_tokens_is_whole_and_has_no_first_token():
    answer = read(token("", "stop"), usage(4, 0), DONE)
    assert (answer.n, answer.chunk_ns, answer.failure()) == (0, [], "")


def test_cached_tokens_are_read():
    more = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    assert read(token(finish="stop"), event(choices=[], usage=more), DONE).cached_tokens == 8


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([token(), event(error={"message": "rank 1 was killed", "type": "x"})], "rank 1 was killed"),
        ([token(), event(error="plain words")], "plain words"),
        ([token(), token()], "ended before the answer did"),
        ([b"<html>Bad gateway</html>"], "not a stream of events; it began with: <html>Bad gateway"),
        ([], "nothing at all"),
        ([b"data: {oops\n\n", token(finish="stop"), DONE], "no JSON chunk: {oops"),
        ([token(finish="abort"), DONE], "abort"),
    ],
)
def test_what_is_no_whole_answer_says_why(pieces, sentence):
    assert sentence in read(*pieces).failure()


def test_tokens_before_an_error_are_kept():
    answer = read(token(), token(), event(error={"message": "gone"}))
    assert (answer.n, answer.chunk_ns) == (2, [1, 2])


def test_a_last_event_without_its_blank_line_counts():
    assert read(token(), token(finish="length").rstrip()).n == 2


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"detail": "no such model"}', "no such model"),
        (b'{"error": "busy"}', "busy"),
        (b"upstream\n timed out", "upstream timed out"),
        (b"", ""),
    ],
)
def test_the_sentence_of_an_error_body(body, sentence):
    assert error_of_body(body) == sentence
