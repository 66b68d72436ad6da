"""The byte-level tokenizer as files that other engines read, so that an exported checkpoint speaks the same text there.

tokenizer.json says in the `tokenizers` library's terms what `ByteTokenizer` does in code: 256 byte symbols without
merges, six special tokens, and one name for each id beyond, which the decoder shows as the placeholder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.model.tokenizer import NUM_BYTES, PLACEHOLDER, SPECIALS

CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def write_tokenizer(folder: Path | str, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for a vocabulary of `vocab_size` ids.

    Raises ValueError when bytes and specials do not fit into it.
    """
    smallest = NUM_BYTES + len(SPECIALS)
    if vocab_size < smallest:
        raise ValueError(
            f"A byte-level tokenizer needs {smallest} ids ({NUM_BYTES} bytes, {len(SPECIALS)} specials), "
            f"and this vocabulary has {vocab_size}."
        )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    _library_tokenizer(vocab_size).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(_config(), indent=2) + "\n", encoding="utf-8")


def byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies: itself when printable, else from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    for byte in range(NUM_BYTES):
        if byte not in symbols:
            symbols[byte] = chr(NUM_BYTES + len(symbols) - len(printable))
    return [symbols[byte] for byte in range(NUM_BYTES)]


def _library_tokenizer(vocab_size: int) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    first_unnamed = NUM_BYTES + len(SPECIALS)
    names = byte_symbols() + list(SPECIALS) + [f"<|id_{i}|>" for i in range(first_unnamed, vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex(r"^<\|id_[0-9]+\|>$"), PLACEHOLDER), decoders.ByteLevel()]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return tokenizer


def _config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
