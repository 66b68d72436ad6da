"""What a completion request may say, and what it then means for the engine.

Bodies are read straight into typed structs, so a wrong type is refused with the field's name. A field that this
server does not run is accepted at its neutral value, as clients send it, and refused with a sentence otherwise; a
field that nobody knows is refused too, since a misspelt option that is silently ignored costs somebody an afternoon.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

import msgspec

from labkit.engine.request import SamplingParams
from labkit.server.errors import ApiError

MAX_LOGPROBS = 20
MAX_STOPS = 16
_IGNORED = {
    "user", "metadata", "store", "service_tier", "request_id", "priority", "cache_salt", "prompt_cache_key",
    "safety_identifier", "spaces_between_special_tokens", "add_special_tokens", "include_reasoning",
    "add_generation_prompt", "parallel_tool_calls", "cache_prompt",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "logit_bias": ({},), "min_p": (0,), "min_tokens": (0,), "use_beam_search": (False,),
    "include_stop_str_in_output": (False,), "prompt_logprobs": (0,), "truncate_prompt_tokens": (),
    "allowed_token_ids": (), "bad_words": ([],), "response_format": ({"type": "text"},),
    "tools": ([],), "tool_choice": ("none", "auto"), "continue_final_message": (False,),
    "chat_template": (), "chat_template_kwargs": ({},), "functions": ([],), "modalities": (["text"],),
}  # fmt: skip
_INSTEAD = {
    "n": "One choice a request is what this server gives: send the request n times.",
    "best_of": "One choice a request is what this server gives: send the request several times.",
    "echo": "Keep the prompt on your side, or ask for return_token_ids to see how it was tokenised.",
    "include_stop_str_in_output": "The text is always cut before the stop string; stop_reason names it.",
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Body(msgspec.Struct, kw_only=True):
    """The fields that completions and chat completions share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False


class CompletionBody(Body, kw_only=True):
    prompt: msgspec.Raw = msgspec.Raw()
    """Text, token ids, or a list of either: told apart after the rest has been read."""
    logprobs: int | None = None


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]] = []
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None


_KNOWN = {kind: frozenset(kind.__struct_fields__) for kind in (CompletionBody, ChatBody)}
_decode_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decoders = {kind: msgspec.json.Decoder(kind) for kind in (CompletionBody, ChatBody)}


def read_body(data: bytes, kind: type[Any]) -> Any:
    """Raises ApiError 400 that names the field."""
    try:
        body = _decoders[kind].decode(data)
        extra = _decode_keys(data).keys() - _KNOWN[kind]
    except msgspec.ValidationError as error:
        raise ApiError(400, f"A field has the wrong type: {error}.") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body must be a JSON object: {error}.") from error
    if extra:
        fields = _decode_keys(data)
        _check_extra({name: msgspec.json.decode(fields[name]) for name in extra}, kind)
    return body


def _check_extra(fields: dict[str, Any], kind: type[Any]) -> None:
    for name, value in fields.items():
        if name in _IGNORED or value is None:
            continue
        if name not in _NEUTRAL:
            raise _unknown_field(name, kind)
        if value not in _NEUTRAL[name]:
            advice = _INSTEAD.get(name, "Leave it out.")
            raise ApiError(400, f"{name}={json.dumps(value)} is not supported by this server. {advice}", name)


def _unknown_field(name: str, kind: type[Any]) -> ApiError:
    known = sorted(_KNOWN[kind] | _NEUTRAL.keys())
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(_KNOWN[kind]))}."
    return ApiError(400, f"There is no field {name!r}: {hint}", name)


# ---- sampling -------------------------------------------------------------------------------------------------------


def sampling_params(body: Body, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """The checked values. Raises ApiError 400."""
    _require(max_tokens >= 1, "max_tokens", max_tokens, "at least 1, so that there is a token to answer with")
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    _require(0 <= temperature < 100, "temperature", temperature, "0 (greedy) or more")
    _require(0 < top_p <= 1, "top_p", top_p, "in (0, 1]")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=_top_k(body.top_k),
        seed=body.seed,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=_logprobs(logprobs),
    )


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ApiError(400, f"{name} is {value}; it must be {allowed}.", name)


def _top_k(value: int | None) -> int:
    if value is None or value == -1:
        return 0
    _require(value >= 0, "top_k", value, "-1 or 0 (no limit), or the number of candidates")
    return value


def _stops(value: str | list[str] | None) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value or ())
    _require(len(stops) <= MAX_STOPS, "stop", f"{len(stops)} strings", f"at most {MAX_STOPS}")
    _require(all(stops), "stop", "an empty string", "text with at least one character")
    return stops


def _logprobs(value: int | None) -> int | None:
    if value is not None:
        allowed = f"between 0 and {MAX_LOGPROBS}"
        _require(0 <= value <= MAX_LOGPROBS, "logprobs", value, allowed)
    return value


def chat_logprobs(body: ChatBody) -> int | None:
    """How many alternatives a chat request wants beside each token; None when it wants none at all."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


# ---- prompts --------------------------------------------------------------------------------------------------------


def read_prompts(raw: msgspec.Raw) -> list[str | list[int]]:
    """One prompt or several, each text or token ids. Raises ApiError 400."""
    data = bytes(raw)
    if not data or data == b"null":
        raise ApiError(400, "The request has no prompt: give text, or a list of token ids.", "prompt")
    for kind in (list[int], str, list[list[int]], list[str]):
        try:
            prompt: Any = msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            continue
        return _several([prompt] if kind in (list[int], str) and prompt != [] else prompt)
    raise ApiError(400, "prompt must be text, a list of token ids, or a list of either.", "prompt")


def _several(prompts: Any) -> list[str | list[int]]:
    if not prompts:
        raise ApiError(400, "The prompt is an empty list: it needs at least one token.", "prompt")
    return list(prompts)


def flat_messages(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Role and text of each turn; content given in parts is joined. Raises ApiError 400."""
    if not messages:
        raise ApiError(400, "messages is empty: a chat needs at least one turn.", "messages")
    return [{"role": _role(m), "content": _content(m.get("content"))} for m in messages]


def _role(message: dict[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise ApiError(400, "Every message needs a role: system, user or assistant.", "messages")
    return "system" if role == "developer" else role


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(p.get("text", "")) for p in content)
    raise ApiError(400, "A message's content must be text, or parts of type text.", "messages")
