"""Text to token ids and back, one token at a time: what stands between a prompt and the engine's integers.

A checkpoint with tokenizer.json brings its own (read by the `tokenizers` library, chat template by Jinja). Every other
model gets the built-in byte-level one: ids 0..255 are bytes, six specials follow, and the ids beyond have no text of
their own, so each shows as one placeholder character and a model with random weights still streams something to see.
A `Detokenizer` turns a growing sequence into growing text: half a character is an empty text and still a token.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _HubTokenizer

NUM_BYTES = 256
SPECIALS = ("<bos>", "<eos>", "<pad>", "<system>", "<user>", "<assistant>")
"""Ids 256.. of the byte-level tokenizer, in order."""
PLACEHOLDER = "□"
"""What an id without a text of its own shows as."""
Message = dict[str, str]
"""One turn of a chat: `role` and `content`, both text."""


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still in parts."""
        ...

    def flush(self) -> str:
        """What was left in parts, as the replacement character; the sequence is over."""
        ...


class Tokenizer(Protocol):
    """What the server asks of a tokenizer. Ids are ints in [0, vocab_size)."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def detokenizer(self, skip_special: bool = True) -> Detokenizer: ...


def load_tokenizer(folder: Path | str, vocab_size: int) -> Tokenizer:
    """The folder's own tokenizer when it has tokenizer.json, else the byte-level one for `vocab_size` ids."""
    path = Path(folder)
    if path.is_file():
        path = path.parent
    if (path / "tokenizer.json").is_file():
        return HubTokenizer(path, vocab_size)
    return ByteTokenizer(vocab_size)


# ---- byte level -----------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """Bytes are ids. Works for any vocabulary; one smaller than 256 takes only the bytes that it has ids for."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        fits = vocab_size >= NUM_BYTES + len(SPECIALS)
        self.specials: dict[str, int] = {s: NUM_BYTES + i for i, s in enumerate(SPECIALS)} if fits else {}
        self._names = {token_id: name for name, token_id in self.specials.items()}

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes as ids. Raises ValueError when the vocabulary has no id for one of them."""
        data = text.encode("utf-8", "replace")
        if self.vocab_size < NUM_BYTES and data and max(data) >= self.vocab_size:
            raise ValueError(
                f"The text has the byte {max(data)}, and this model's vocabulary ends at id {self.vocab_size - 1}: "
                f"send the prompt as token ids, or serve a model with at least {NUM_BYTES} tokens."
            )
        return list(data)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """<bos>, then role, content and <eos> of each message, then <assistant>; plain lines in a small vocabulary."""
        if not self.specials:
            return self.encode(plain_chat(messages))
        ids = [self.specials["<bos>"]]
        for message in messages:
            ids.append(self._role_id(message["role"]))
            ids.extend(self.encode(message["content"]))
            ids.append(self.specials["<eos>"])
        ids.append(self.specials["<assistant>"])
        return ids

    def _role_id(self, role: str) -> int:
        if f"<{role}>" not in SPECIALS[3:]:
            raise ValueError(f"The role {role!r} is not known to this model: use system, user or assistant.")
        return self.specials[f"<{role}>"]

    def decode(self, token_ids: Sequence[int]) -> str:
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < NUM_BYTES:
            return bytes((token_id,))
        return self._names.get(token_id, PLACEHOLDER).encode()

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        return _ByteDetokenizer({} if skip_special else self._names, len(self.specials))


class _ByteDetokenizer:
    def __init__(self, names: dict[int, str], num_specials: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._names = names
        self._first_unnamed = NUM_BYTES + num_specials
        self._is_partial = False

    def push(self, token_id: int) -> str:
        if token_id < NUM_BYTES:
            text = self._decoder.decode(bytes((token_id,)))
            self._is_partial = token_id >= 0x80 and bool(self._decoder.getstate()[0])
            return text
        if token_id >= self._first_unnamed:
            return self.flush() + PLACEHOLDER if self._is_partial else PLACEHOLDER
        name = self._names.get(token_id)
        return "" if name is None else self.flush() + name

    def flush(self) -> str:
        self._is_partial = False
        left = self._decoder.decode(b"", True)
        self._decoder.reset()
        return left


# ---- tokenizer.json -------------------------------------------------------------------------------------------------


class HubTokenizer:
    """tokenizer.json through the `tokenizers` library, with the chat template that lies beside it."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        from tokenizers import Tokenizer as Library

        self._library: _HubTokenizer = Library.from_file(str(folder / "tokenizer.json"))
        self.vocab_size = vocab_size
        self._config = _read_json(folder / "tokenizer_config.json")
        self._template = _chat_template(folder, self._config)
        self.token_text = functools.lru_cache(maxsize=1 << 16)(self._token_text)

    def encode(self, text: str) -> list[int]:
        return list(self._library.encode(text).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The template's own special tokens stand in its text, so none are added. ValueError when it refuses."""
        if self._template is None:
            return self.encode(plain_chat(messages))
        rendered = _render(self._template, messages, self._config)
        return list(self._library.encode(rendered, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._library.decode(list(token_ids), skip_special_tokens=True))

    def _token_text(self, token_id: int) -> str:
        if self._library.id_to_token(token_id) is None:
            return PLACEHOLDER
        return str(self._library.decode([token_id], skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        return _HubDetokenizer(self._library, skip_special)


class _HubDetokenizer:
    def __init__(self, library: _HubTokenizer, skip_special: bool) -> None:
        self._library, self._skip_special = library, skip_special
        self._size = library.get_vocab_size(with_added_tokens=True)
        self._pending: list[int] = []  # tokens that have shown no text yet
        self._start()

    def _start(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=self._skip_special)

    def push(self, token_id: int) -> str:
        if token_id >= self._size:  # rows that pad the embedding have logits but no text
            return self.flush() + PLACEHOLDER
        try:
            text = self._stream.step(self._library, token_id)
        except Exception:  # the library gives up on a prefix that is no valid text: begin again behind it
            left = self.flush()
            text = left + (self._stream.step(self._library, token_id) or "")
        if text:
            self._pending.clear()
            return str(text)
        self._pending.append(token_id)
        return ""

    def flush(self) -> str:
        left = str(self._library.decode(self._pending, skip_special_tokens=self._skip_special))
        self._pending.clear()
        self._start()
        return left


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's; of several named ones, `default`."""
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template


def _render(template: str, messages: Sequence[Message], config: dict[str, Any]) -> str:
    from jinja2 import TemplateError

    try:
        return _compiled(template).render(messages=list(messages), add_generation_prompt=True, **_special_texts(config))
    except TemplateError as error:
        raise ValueError(f"The model's chat template refused the messages: {error}") from error


def _special_texts(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as text; some files keep them as objects with `content`."""
    texts = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name) or ""
        texts[name] = value["content"] if isinstance(value, dict) else value
    return texts


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """A sandbox, since a template is code that came with a checkpoint."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template)


def plain_chat(messages: Sequence[Message]) -> str:
    """`role: content` lines, for models that say nothing about chats."""
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"
