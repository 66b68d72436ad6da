"""Sentences that stay English strings to everybody, and patterns with values to a page in another language."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from labkit.said import Said, bare_pattern, in_turn, said_by, say, with_commas, with_semicolons


def test_it_is_the_english_string():
    told = say("It needs {n:,} ranks, and {there} are there.", n=1024, there=8)
    assert told == "It needs 1,024 ranks, and 8 are there."
    assert json.dumps({"reason": told}) == '{"reason": "It needs 1,024 ranks, and 8 are there."}'
    assert told.pattern == "It needs {n} ranks, and {there} are there."
    assert told.values == {"n": "1,024", "there": "8"}


def test_a_sentence_inside_a_sentence_stays_one():
    inner = say("{n} layers", n=3)
    outer = say("Of {what} none fits.", what=inner)
    assert outer == "Of 3 layers none fits." and outer.values["what"] is inner


def test_braces_in_a_value_are_left_alone():
    assert say("from {a} to {b}", a="{", b="{n}") == "from { to {n}"


def test_a_place_without_a_value_is_refused():
    with pytest.raises(KeyError, match="n"):
        say("{n} ranks")


def test_joined_sentences_keep_their_parts():
    one, two = say("One."), say("Two {n}.", n=2)
    assert in_turn("", one, "", two) == "One. Two 2." and in_turn("", "") == ""
    assert in_turn(one) is one
    joined = with_semicolons([one, two, one])
    assert joined == "One.; Two 2.; One." and isinstance(joined, Said) and joined.values["first"].values["then"] is two
    assert with_commas(["tp", "pp"]) == "tp, pp"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda told: pickle.loads(pickle.dumps(told))])
def test_a_copy_is_said_alike(again):
    told = say("{n} ranks", n=2)
    assert again(told) == told and again(told).pattern == told.pattern and again(told).values == told.values


def test_an_errors_sentence_is_found_in_parts():
    told = say("{n} is too many.", n=9)
    assert said_by(ValueError(told)) is told and said_by(ValueError("plain")) == "plain"
    assert said_by(KeyError("x")) == "'x'"


def test_bare_patterns_have_no_formats():
    assert bare_pattern("{a:.2f} of {b!s}") == "{a} of {b}"
