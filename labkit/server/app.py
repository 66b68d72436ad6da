"""The web application: who may come in, where each path leads, and how every refusal looks.

The token guards everything but /health and the landing page's files, which are the same for everybody (the page asks
for the state with the token of its own address). The Host header must name this machine, so that a page somewhere on
the web cannot reach a local server through a name that it controls.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from labkit.server import bench_api, lab_api, openai
from labkit.server.errors import ApiError, error_response
from labkit.server.lab_api import SHUTDOWN
from labkit.server.lifetime import Lifetime
from labkit.server.openai import SERVICE
from labkit.server.service import Service

MAX_BODY_BYTES = 64 << 20
_OPEN_PATHS = ("/", "/health", "/landing.css", "/landing.js", "/favicon.ico")
_UNCOUNTED_PATHS = ("/health", "/metrics", "/favicon.ico")
"""Monitors that ask for ever: they must not keep an idle server alive."""
_HERE = Path(__file__).resolve().parent


def make_app(
    service: Service, token: str, lifetime: Lifetime, shutdown: asyncio.Event, allowed_hosts: Iterable[str] = ()
) -> web.Application:
    app = web.Application(
        client_max_size=MAX_BODY_BYTES,
        middlewares=[_refusals, _guard(token, frozenset(allowed_hosts)), _counted(lifetime)],
    )
    app[SERVICE] = service
    app[SHUTDOWN] = shutdown
    app.add_routes(_routes())
    return app


def _routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/completions", openai.completions),
        web.post("/v1/chat/completions", openai.chat_completions),
        web.get("/v1/models", openai.models),
        web.get("/health", health),
        web.get("/metrics", metrics),
        web.get("/lab/state", lab_api.state),
        web.get("/lab/choices", lab_api.choices),
        web.post("/lab/switch", lab_api.switch),
        web.post("/lab/lease", lab_api.lease),
        web.post("/lab/release", lab_api.release),
        web.post("/lab/profile", lab_api.profile),
        web.get("/lab/bench", bench_api.last),
        web.post("/lab/bench", bench_api.measure),
        web.get("/lab/events", lab_api.events),
        web.post("/lab/fault", lab_api.fault),
        web.post("/lab/links", lab_api.links),
        web.post("/lab/shutdown", lab_api.shutdown),
        web.get("/", landing("landing.html", "text/html")),
        web.get("/landing.css", landing("landing.css", "text/css")),
        web.get("/landing.js", landing("landing.js", "text/javascript")),
    ]


async def health(http: web.Request) -> web.Response:
    """200 while the process lives; the word says whether the ranks do."""
    return web.json_response({"status": http.app[SERVICE].state_of_health()})


async def metrics(http: web.Request) -> web.Response:
    text = http.app[SERVICE].metrics.text()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def landing(name: str, kind: str) -> Handler:
    body = (_HERE / name).read_bytes()
    headers = {
        "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
        "Content-Type": f"{kind}; charset=utf-8",
    }

    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=body, headers=headers)

    return handler


# ---- middlewares ----------------------------------------------------------------------------------------------------


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        return error_response(ApiError(error.status, _sentence(request, error)))
    except ConnectionResetError:
        raise  # the client has gone; aiohttp ends the connection
    except Exception as error:
        print(f"labkit: {request.method} {request.path} failed:", file=sys.stderr)
        traceback.print_exc()
        return error_response(ApiError(500, f"The server failed here: {type(error).__name__}: {error}."))


def _sentence(http: web.Request, error: web.HTTPException) -> str:
    if error.status == 404:
        return f"There is nothing at {http.path}. The endpoints are under /v1 (OpenAI) and /lab."
    if error.status == 405:
        return f"{http.path} does not take {http.method}."
    if error.status == 413:
        return f"The body is too large: at most {MAX_BODY_BYTES >> 20} MiB."
    return f"{error.reason}."


def _guard(token: str, allowed_hosts: frozenset[str]) -> Middleware:
    expected = token.encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        _check_host(request.host, allowed_hosts)
        if request.path not in _OPEN_PATHS and not hmac.compare_digest(_given_token(request), expected):
            raise ApiError(
                401,
                "This needs the server's token: send `Authorization: Bearer …`, with the token that `labkit serve` "
                "printed (or open the printed link, which carries it).",
            )
        return await handler(request)

    return guard


def _given_token(http: web.Request) -> bytes:
    scheme, _, given = http.headers.get("Authorization", "").partition(" ")
    return given.strip().encode() if scheme.lower() == "bearer" else b""


def _check_host(host: str, allowed: frozenset[str]) -> None:
    name = host_name(host)
    if name not in allowed and not is_loopback(name):
        raise ApiError(
            403,
            f"The request names the host {name!r}, which is not this machine's loopback. "
            f"Start the server with --allow-host {name} if that is meant.",
        )


def host_name(host: str) -> str:
    """A Host header without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _counted(lifetime: Lifetime) -> Middleware:
    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _UNCOUNTED_PATHS:
            return await handler(request)
        with lifetime.client():
            return await handler(request)

    return counted
