"""Text to ids and back: the byte-level tokenizer, its files for other engines, and the incremental detokenizers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.model.tokenizer import PLACEHOLDER, ByteTokenizer, HubTokenizer, Tokenizer, load_tokenizer
from labkit.model.tokenizer_files import byte_symbols, write_tokenizer

VOCAB = 600
TEXTS = ["hello", "héllo wörld", "日本語 🎉", " two  spaces\n\ttab", "", "<user> is text here: <id_300>"]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüß dich"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, VOCAB)
    return path


@pytest.fixture(params=["byte", "hub"])
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Tokenizer:
    return ByteTokenizer(VOCAB) if request.param == "byte" else load_tokenizer(folder, VOCAB)


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_text_is_its_bytes_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode() and tokenizer.decode(ids) == text


def test_names_of_specials_in_text_stay_text() -> None:
    tokenizer = ByteTokenizer(VOCAB)
    assert tokenizer.decode(tokenizer.encode(TEXTS[-1])) == TEXTS[-1]
    assert max(tokenizer.encode_chat([{"role": "user", "content": "<eos>"}])[2:-2]) < 256


def test_half_a_character_is_an_empty_text(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(i) for i in "é🎉".encode()] == ["", "é", "", "", "", "🎉"]
    assert detokenizer.flush() == ""


def test_a_character_cut_off_by_the_end_shows_as_the_replacement(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(0xF0) == "" and "\ufffd" in detokenizer.flush()


def test_ids_without_a_text_stream_as_a_visible_character(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    shown = "".join(map(detokenizer.push, [262, 599, 104, 300])) + detokenizer.flush()
    assert shown == f"{PLACEHOLDER}{PLACEHOLDER}h{PLACEHOLDER}" and PLACEHOLDER.isprintable()


def test_special_ids_are_skipped_unless_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([104, 257, 105]) == "hi"
    detokenizer = tokenizer.detokenizer(skip_special=False)
    assert "".join(map(detokenizer.push, [104, 257, 105])) + detokenizer.flush() == "h<eos>i"
    assert tokenizer.token_text(257) == "<eos>"


def random_ids(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCAB) if draw.random() < 0.5 else draw.randrange(128, 262) for _ in range(length)]


def test_a_stream_of_any_ids_adds_up_to_the_whole(tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    for _ in range(300):
        ids = random_ids(draw, 20)
        detokenizer = tokenizer.detokenizer()
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


def test_the_written_files_say_what_the_code_does(folder: Path) -> None:
    ours, theirs = ByteTokenizer(VOCAB), load_tokenizer(folder, VOCAB)
    assert isinstance(theirs, HubTokenizer)
    draw = random.Random(2)
    for _ in range(300):
        ids = random_ids(draw, 12)
        assert ours.decode(ids) == theirs.decode(ids)
    assert [ours.token_text(i) for i in range(VOCAB)] == [theirs.token_text(i) for i in range(VOCAB)]
    assert ours.encode_chat(CHAT) == theirs.encode_chat(CHAT)


def test_transformers_reads_the_written_files(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), ByteTokenizer(VOCAB)
    for text in TEXTS[:-1]:
        assert theirs.encode(text) == ours.encode(text)
    assert theirs.eos_token_id == 257 and theirs.bos_token_id == 256
    chat = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(chat) == ours.encode_chat(CHAT)
    assert theirs.decode([104, 300, 257], skip_special_tokens=True) == f"h{PLACEHOLDER}"


def test_byte_symbols_are_distinct_and_printable() -> None:
    symbols = byte_symbols()
    assert len(set(symbols)) == 256 and symbols[65] == "A" and symbols[32] == "Ġ"


def test_a_vocabulary_too_small_for_bytes_takes_what_it_has_and_says_what_it_lacks() -> None:
    tokenizer = ByteTokenizer(151)
    assert tokenizer.encode("abc") == [97, 98, 99]
    with pytest.raises(ValueError, match="vocabulary ends at id 150: send the prompt as token ids"):
        tokenizer.encode("日")
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "x"}])) == "user: x\nassistant:"
    with pytest.raises(ValueError, match="needs 262 ids"):
        write_tokenizer("/nowhere", 151)


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="role 'tool'"):
        ByteTokenizer(VOCAB).encode_chat([{"role": "tool", "content": ""}])


# ---- chat templates of checkpoints


def with_template(folder: Path, into: Path, template: object) -> Tokenizer:
    (into / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    config = {"bos_token": {"content": "<bos>"}, "chat_template": template}
    (into / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(into, VOCAB)


def test_a_template_sees_special_tokens_and_named_ones_prefer_default(folder: Path, tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{bos_token}}{{messages|length}}"}]
    assert with_template(folder, tmp_path, named).encode_chat(CHAT) == [256, ord("4")]


def test_a_template_may_refuse_and_may_not_escape(folder: Path, tmp_path: Path) -> None:
    refusing = with_template(folder, tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        refusing.encode_chat(CHAT)
    escaping = with_template(folder, tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="unsafe"):
        escaping.encode_chat(CHAT)


def test_a_checkpoint_without_a_template_gets_plain_lines(folder: Path, tmp_path: Path) -> None:
    plain = with_template(folder, tmp_path, None)
    assert plain.decode(plain.encode_chat(CHAT[-1:])) == "user: ?\nassistant:"


def test_no_torch_comes_along() -> None:
    code = (
        "import sys, labkit.model.tokenizer, labkit.model.tokenizer_files, labkit.server.serve, labkit.server.options\n"
        "import labkit.server.client, labkit.server.discovery, labkit.server.cli_commands\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_client_is_light() -> None:
    code = (
        "import sys, labkit.server.client, labkit.server.discovery\n"
        "heavy = {'aiohttp', 'asyncio', 'numpy', 'pandas', 'typer', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
