"""The OpenAI-compatible endpoints, as vLLM answers them: completions and chat, streamed or whole.

Here a body becomes a job: prompts as ids, checked sampling parameters, one request to the engine per prompt.
"""

from __future__ import annotations

import secrets
import time

from aiohttp import web

from labkit.engine.request import Request, SamplingParams
from labkit.server.answer import Answer, LogprobForms
from labkit.server.answering import Job, chat_choice, completion_choice, serve
from labkit.server.chunks import ChatChunks, Chunks, Wanted, dumps
from labkit.server.errors import ApiError
from labkit.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    chat_logprobs,
    flat_messages,
    read_body,
    read_prompts,
    sampling_params,
)
from labkit.server.service import Service

SERVICE = web.AppKey("service", Service)
DEFAULT_MAX_TOKENS = 16
"""Of completions; a chat without max_tokens may fill the context."""


async def completions(http: web.Request) -> web.StreamResponse:
    data = await http.read()
    received_ns = time.monotonic_ns()
    service = http.app[SERVICE]
    body: CompletionBody = read_body(data, CompletionBody)
    service.check_model(body.model)
    prompts = [_prompt_ids(service, prompt) for prompt in read_prompts(body.prompt)]
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = [sampling_params(body, max_tokens, body.logprobs) for _ in prompts]
    job = _job(http, body, "cmpl", Chunks, list(zip(prompts, params, strict=True)), received_ns)
    return await serve(http, job, completion_choice)


async def chat_completions(http: web.Request) -> web.StreamResponse:
    data = await http.read()
    received_ns = time.monotonic_ns()
    service = http.app[SERVICE]
    body: ChatBody = read_body(data, ChatBody)
    service.check_model(body.model)
    prompt = _chat_ids(service, body)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = max(1, service.model.max_len - len(prompt)) if asked is None else asked
    params = sampling_params(body, max_tokens, chat_logprobs(body))
    job = _job(http, body, "chatcmpl", ChatChunks, [(prompt, params)], received_ns)
    return await serve(http, job, chat_choice)


async def models(http: web.Request) -> web.Response:
    model = http.app[SERVICE].model
    card = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "labkit",
        "root": str(model.folder),
        "parent": None,
        "max_model_len": model.max_len,
    }
    return web.Response(body=dumps({"object": "list", "data": [card]}), content_type="application/json")


# ---- from body to job -----------------------------------------------------------------------------------------------


def _prompt_ids(service: Service, prompt: str | list[int]) -> list[int]:
    ids = _encoded(service, prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise ApiError(400, "The prompt has no tokens: it needs at least one.", "prompt")
    vocab_size = service.model.spec.vocab_size
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise ApiError(400, f"Token id {wrong} is not in the vocabulary: ids go from 0 to {vocab_size - 1}.", "prompt")
    return ids


def _encoded(service: Service, text: str) -> list[int]:
    try:
        return service.model.tokenizer.encode(text)
    except ValueError as error:
        raise ApiError(400, str(error), "prompt") from error


def _chat_ids(service: Service, body: ChatBody) -> list[int]:
    try:
        return service.model.tokenizer.encode_chat(flat_messages(body.messages))
    except ValueError as error:
        raise ApiError(400, str(error), "messages") from error


def _job(
    http: web.Request,
    body: Body,
    prefix: str,
    chunks: type[Chunks],
    asked: list[tuple[list[int], SamplingParams]],
    received_ns: int,
) -> Job:
    service = http.app[SERVICE]
    name = _request_id(http)
    options = body.stream_options
    usage = bool(options and options.include_usage)
    wanted = Wanted(
        usage=usage,
        continuous_usage=usage and bool(options and options.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        logprobs=any(params.logprobs is not None for _, params in asked),
    )
    run_id = http.headers.get("X-Labkit-Run", "")
    tokenizer = service.model.tokenizer
    answers = [
        Answer(_request(name, i, prompt, params, received_ns, run_id), tokenizer, i, body.skip_special_tokens)
        for i, (prompt, params) in enumerate(asked)
    ]
    meta = {"id": f"{prefix}-{name}", "created": int(time.time()), "model": service.model.name}
    forms = LogprobForms(tokenizer, bool(body.return_tokens_as_token_ids))
    return Job(service, body, wanted, meta, chunks, answers, forms)


def _request_id(http: web.Request) -> str:
    name = http.headers.get("X-Request-Id", "")
    if len(name) > 128:
        raise ApiError(400, f"X-Request-Id has {len(name)} characters; at most 128 are kept.")
    return name or secrets.token_hex(12)


def _request(
    name: str, index: int, prompt: list[int], params: SamplingParams, received_ns: int, run_id: str
) -> Request:
    """Several prompts in one body are several requests to the engine; the first keeps the body's id."""
    seed = secrets.randbits(62) if params.seed is None else params.seed & (2**62 - 1)
    request_id = name if index == 0 else f"{name}-{index}"
    return Request(request_id, tuple(prompt), params, received_ns, run_id=run_id, seed=seed)
