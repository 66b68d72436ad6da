"""Before a run against a server we do not know: which of our options does it take, and how long is a word
there?

One request of one token is sent with everything that helps a measurement; each refusal takes the least needed
option away (token ids, then end-of-text handling, then running usage, then usage itself) until the server
answers. For servers that take text, the usage of two such answers tells how many tokens a word makes and what
a template adds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.error
import urllib.request

import numpy as np

from labkit.load.schedule import PlannedRequest
from labkit.load.sse import error_of_body
from labkit.load.target import Dialect, RequestWriter, Target
from labkit.load.wire import Exchange, Pool, tls_context
from labkit.measure.records import RequestRecord

_CONCESSIONS: tuple[dict[str, bool], ...] = (
    {"token_ids": False},
    {"ignore_eos": False},
    {"continuous_usage": False},
    {"usage": False},
)
_TRIAL_WORDS = (32, 96)


class ServerUnusable(RuntimeError):
    """The server cannot be measured as asked; the message says what it answered."""


async def reach(target: Target, pool: Pool) -> None:
    """Opens the first connection. Raises ServerUnusable when nobody answers there."""
    try:
        await pool.warm(1)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ServerUnusable(f"could not reach {target.url}: {reason}. Is the server running?") from error


async def find_model(target: Target) -> str:
    """The target's model, or the first that the server lists. Raises ServerUnusable when it lists none."""
    if target.model:
        return target.model
    return await asyncio.to_thread(_first_model, target)


def _first_model(target: Target) -> str:
    address = target.address()
    url = f"{'https' if address.tls else 'http'}://{address.header}{address.base}/models"
    headers = {"Authorization": f"Bearer {target.token}"} if target.token else {}
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls_context(target))
    )
    try:
        with direct.open(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        raise ServerUnusable(f"{url} answered HTTP {error.code}: {error_of_body(error.read())}") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ServerUnusable(f"{url} did not list a model ({error}); name one with --model.") from error


async def negotiate(target: Target, pool: Pool, writer: RequestWriter) -> Dialect:
    """What the server takes. Our own server takes everything and is not asked.

    Raises ServerUnusable with the server's words when even the plainest request is refused.
    """
    if target.labkit:
        return Dialect(token_ids=True)
    dialect = Dialect(token_ids=False)
    record = await _ask(pool, writer, dialect, _TRIAL_WORDS[0])
    for concession in _CONCESSIONS[1:]:
        if record.http_status not in (400, 422):
            break
        dialect = dataclasses.replace(dialect, **concession)
        record = await _ask(pool, writer, dialect, _TRIAL_WORDS[0])
    if record.status != "completed":
        raise ServerUnusable(f"{target.url} did not answer a trial request: {record.error}")
    return await _measured(target, pool, writer, dialect, record) if target.sends_text else dialect


async def _measured(
    target: Target, pool: Pool, writer: RequestWriter, dialect: Dialect, first: RequestRecord
) -> Dialect:
    """The dialect with the ratio of words to tokens, from two prompts of different length."""
    second = await _ask(pool, writer, dialect, _TRIAL_WORDS[1])
    tokens = second.prompt_tokens - first.prompt_tokens
    if second.status != "completed" or not first.prompt_tokens or tokens <= 0:
        return dialect
    ratio = (_TRIAL_WORDS[1] - _TRIAL_WORDS[0]) / tokens
    overhead = max(0, first.prompt_tokens - round(_TRIAL_WORDS[0] / ratio))
    return dataclasses.replace(dialect, words_per_token=ratio, overhead_tokens=overhead)


async def _ask(pool: Pool, writer: RequestWriter, dialect: Dialect, num_words: int) -> RequestRecord:
    """One request of one token, its record."""
    trial = dataclasses.replace(writer, dialect=dialect, run_id=f"{writer.run_id}-trial")
    ids = np.arange(num_words, dtype=np.int32) + 3
    settled = asyncio.Event()
    record = RequestRecord(trial.request_id(num_words), num_words, "unsent", 0)
    payload = trial.write(PlannedRequest(index=num_words, gap=0.0, prompt_ids=ids, max_tokens=1))
    exchange = Exchange(payload, record, lambda _: settled.set())
    pool.send(exchange)
    try:
        await asyncio.wait_for(settled.wait(), writer.target.timeout_s)
    except TimeoutError:
        exchange.settle("failed", f"no answer within {writer.target.timeout_s:g} s")
    return record
