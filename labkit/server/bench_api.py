"""The endpoints of what joins the ranks: what was measured last, and a measurement now.

A measurement is a response that does not end before it does: a line whenever it has come further, the last one with
the result, or with the sentence of why not. When its reader goes away, it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from aiohttp import web

from labkit.server.chunks import dumps
from labkit.server.errors import ApiError
from labkit.server.openai import SERVICE
from labkit.server.service import Service

LINE_EVERY_S = 0.2


class BenchBody(msgspec.Struct, forbid_unknown_fields=True):
    client: str = "somebody"


async def last(http: web.Request) -> web.Response:
    """On a thread: a machine with GPUs is looked at through its driver."""
    service = http.app[SERVICE]
    await service.until_started()
    told = await asyncio.to_thread(service.fabric.told)
    return web.Response(body=dumps(told), content_type="application/json")


async def measure(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    try:
        body = msgspec.json.decode(await http.read(), type=BenchBody)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is not what {http.path} takes (client): {error}.") from error
    await service.until_ready()
    ticket = service.fabric.begin(body.client)
    working = asyncio.create_task(service.fabric.run(ticket))
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-cache"})
    try:
        await response.prepare(http)
        await _tell(service, response, working)
    finally:
        service.fabric.stop()
        with contextlib.suppress(ApiError):
            await asyncio.shield(working)
    return response


async def _tell(service: Service, response: web.StreamResponse, working: asyncio.Task[dict[str, Any]]) -> None:
    while not working.done():
        await asyncio.wait([working], timeout=LINE_EVERY_S)
        if service.fabric.progress is not None:
            await response.write(dumps({"bench": "progress", **service.fabric.progress}) + b"\n")
    try:
        line = {"bench": "done", **working.result()}
    except ApiError as error:
        line = {"bench": "failed", "error": error.message, "status": error.status}
    await response.write_eof(dumps(line) + b"\n")

