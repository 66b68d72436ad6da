"""Names as people and result files spell them, to a folder of data/models and a precision.

"deepseek-ai/DeepSeek-R1" has the shapes of deepseek-v3, "nvidia/Llama-3.1-8B-Instruct-FP8" those of llama-3.1-8b with
its matrices in fp8. Only shapes are meant: training, dates and chat templates change nothing that is counted.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

SAME_SHAPES = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "kimi-k2-thinking": "kimi-k2.5",
    "kimi-k2.6": "kimi-k2.5",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "minimax-m2": "minimax-m2.5",
    "minimax-m2.1": "minimax-m2.5",
}
"""Models whose config differs from a folder's in nothing but the trained context and RoPE."""

_PRECISION = re.compile(r"-(?:kv)?(fp8|nvfp4|mxfp4|fp4|int4|bf16|fp16|awq|gptq-int4|w4a16)(?:-dynamic|-block|-kv)?$")
_VARIANT = re.compile(r"-(instruct|chat|base|hf|it|thinking|preview|v0\.\d|\d{4})$")
_MAKER = re.compile(r"^meta-(?=llama)")


class Named(NamedTuple):
    folder: str
    precision: str
    """"": as the folder's config says."""


def find_alias(name: str, folders: Collection[str]) -> Named | None:
    """`name` with or without its owner, in any case; None when nothing in `folders` has such shapes."""
    rest, precision = name.rsplit("/", 1)[-1].lower(), ""
    rest = _MAKER.sub("", rest)
    if found := _PRECISION.search(rest):
        rest, precision = rest[: found.start()], found[1]
    while True:
        if (folder := SAME_SHAPES.get(rest, rest)) in folders:
            return Named(folder, precision)
        shorter = _VARIANT.sub("", rest)
        if shorter == rest:
            return None
        rest = shorter
