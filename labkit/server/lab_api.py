"""The lab's own endpoints: state, switch, lease, events, drills, links.

A lease is a response that does not end: while the client reads it, the ranks are the client's; when it closes, from
whichever side and for whatever reason, the run's requests are cancelled and the next in line is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from labkit.measure.store import check_run_id
from labkit.server.chunks import dumps
from labkit.server.errors import ApiError
from labkit.server.events import KINDS, Subscriber
from labkit.server.openai import SERVICE
from labkit.server.service import Service
from labkit.server.session import RanksHeld, Ticket

HELD_EVERY_S = 2.0
QUIET_S = 5.0
"""An event stream without events carries an empty line this often, so that both ends notice a dead peer."""
SHUTDOWN = web.AppKey("shutdown", asyncio.Event)
FAULTS = ("raise", "exit", "hang", "delay", "kill", "mute", "unmute")


class SwitchBody(msgspec.Struct, forbid_unknown_fields=True):
    layout: str = ""
    settings: dict[str, Any] = {}
    run_id: str = ""
    """A holder's own run: it may switch while it holds the ranks."""
    client: str = "somebody"
    probe: bool = True
    """Measure the first token of the new layout with a request of 128 prompt tokens."""


class LeaseBody(msgspec.Struct, forbid_unknown_fields=True):
    client: str
    run_id: str
    purpose: str = "a run"
    layout: str = ""
    settings: dict[str, Any] = {}
    expected_s: float = 0.0


class ReleaseBody(msgspec.Struct, forbid_unknown_fields=True):
    run_id: str


class ProfileBody(msgspec.Struct, forbid_unknown_fields=True):
    run_id: str
    ranks: list[int]
    skip: int = 0
    steps: int = 20


class FaultBody(msgspec.Struct, forbid_unknown_fields=True):
    rank: int
    kind: str
    seconds: float = 0.0
    layer: int = -1


class Link(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    url: str
    description: str = ""


class LinksBody(msgspec.Struct, forbid_unknown_fields=True):
    links: list[Link]


async def _read(http: web.Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await http.read(), type=kind)
    except msgspec.DecodeError as error:
        fields = ", ".join(kind.__struct_fields__)
        raise ApiError(400, f"The body is not what {http.path} takes ({fields}): {error}.") from error


def _json(body: Any) -> web.Response:
    return web.Response(body=dumps(body), content_type="application/json")


# ---- state, switch --------------------------------------------------------------------------------------------------


async def state(http: web.Request) -> web.Response:
    return _json(http.app[SERVICE].state())


async def choices(http: web.Request) -> web.Response:
    """Every layout that there is to choose, and why not the others: too much to travel with each state.

    On a thread: half a second's work on 16 ranks, once, in which the engine must not stand.
    """
    service = http.app[SERVICE]
    return _json(await asyncio.to_thread(lambda: service.choices))


async def switch(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    body: SwitchBody = await _read(http, SwitchBody)
    await service.until_started()
    service.plan_switch(body.layout, body.settings)
    async with _ranks_for(service, body):
        begin_s = time.monotonic()
        report = await service.switch(body.layout, body.settings)
        first_token_s = await _probe(service, begin_s) if body.probe else None
    return _json({**dataclasses.asdict(report), "layout": _slug(report), "first_token_s": first_token_s})


@contextlib.asynccontextmanager
async def _ranks_for(service: Service, body: SwitchBody) -> AsyncIterator[None]:
    """The holder's own, or held for the length of the switch. ApiError 409 when they are somebody else's."""
    session = service.session
    mine = body.run_id and session.holder is not None and session.holder.run_id == body.run_id
    if mine:
        yield
        return
    ticket = Ticket(body.client, f"a switch to {body.layout or 'other settings'}", expected_s=1.0)
    try:
        session.take(ticket)
    except RanksHeld as error:
        raise ApiError(409, str(error)) from error
    try:
        yield
    finally:
        session.leave(ticket)


async def _probe(service: Service, begin_s: float) -> float:
    """Seconds from the switch's begin to the first token of the new layout."""
    await service.first_token_s()
    return time.monotonic() - begin_s


def _slug(report: Any) -> str:
    return report.layout if isinstance(report.layout, str) else report.layout.slug


# ---- lease ----------------------------------------------------------------------------------------------------------


async def lease(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    body: LeaseBody = await _read(http, LeaseBody)
    _check_lease(service, body)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-cache"})
    await response.prepare(http)
    ticket = Ticket(body.client, body.purpose, body.run_id, body.expected_s)
    service.session.enqueue(ticket)
    try:
        await _hold(service, response, ticket, body)
    finally:
        # a task of its own: the client's going away cancels this handler, not what must follow
        await asyncio.shield(asyncio.create_task(service.end_run(ticket)))
    await response.write_eof(_line("released", **_outcome(service, ticket)))
    return response


def _check_lease(service: Service, body: LeaseBody) -> None:
    """What can be refused at once is, before anybody waits in line for it."""
    try:
        check_run_id(body.run_id)
    except ValueError as error:
        raise ApiError(400, str(error), "run_id") from error
    if service.session.knows(body.run_id) or service.session.has_ended(body.run_id):
        raise ApiError(409, f"The run {body.run_id} has had its lease: take a new run_id.", "run_id")
    service.plan_switch(body.layout, body.settings)


async def _hold(service: Service, response: web.StreamResponse, ticket: Ticket, body: LeaseBody) -> None:
    await _queue(service, response, ticket)
    report = await _enter(service, response, body)
    if report is False:
        return
    service.begin_run(ticket)
    await response.write(_line("granted", run_id=ticket.run_id, switch=report))
    while not ticket.released.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ticket.released.wait(), HELD_EVERY_S)
            return
        await response.write(_line("held", **_outcome(service, ticket)))


async def _queue(service: Service, response: web.StreamResponse, ticket: Ticket) -> None:
    session = service.session
    while session.holder is not ticket:
        holder = session.holder.describe() if session.holder else None
        eta_s = round(session.eta_s(ticket), 1)
        await response.write(
            _line("queued", position=session.position(ticket), eta_s=eta_s, holder=holder, message=session.sentence())
        )
        await ticket.moved(HELD_EVERY_S)


async def _enter(service: Service, response: web.StreamResponse, body: LeaseBody) -> Any:
    """Switch as the lease asked. The report; None when nothing had to change; False when it failed (and was told)."""
    try:
        if await service.stands_as(body.layout, body.settings):
            return None
        await response.write(_line("switching", layout=body.layout))
        report = await service.switch(body.layout, body.settings)
    except ApiError as error:
        await response.write(_line("failed", error=error.message, status=error.status))
        return False
    return {**dataclasses.asdict(report), "layout": _slug(report)}


def _outcome(service: Service, ticket: Ticket) -> dict[str, Any]:
    return {
        "run_id": ticket.run_id,
        "foreign_requests": ticket.foreign_requests,
        "held_s": round(ticket.held_s, 3),
        "store_error": service.recorder.error,
    }


def _line(kind: str, **fields: Any) -> bytes:
    return dumps({"lease": kind, **fields}) + b"\n"


async def release(http: web.Request) -> web.Response:
    """Give a lease back: its stream then ends with a `released` line, when the run is on disk."""
    service = http.app[SERVICE]
    body: ReleaseBody = await _read(http, ReleaseBody)
    holder = service.session.holder
    if holder is None or holder.run_id != body.run_id:
        raise ApiError(404, f"The run {body.run_id} does not hold the ranks. {service.session.sentence()}", "run_id")
    holder.released.set()
    return _json({"released": body.run_id})


async def profile(http: web.Request) -> web.Response:
    """Ask ranks for a profile of the steps to come, within a run that holds the ranks; it lands in the run's folder."""
    service = http.app[SERVICE]
    body: ProfileBody = await _read(http, ProfileBody)
    holder = service.session.holder
    if holder is None or holder.run_id != body.run_id:
        raise ApiError(409, f"The run {body.run_id} does not hold the ranks. {service.session.sentence()}", "run_id")
    service.profiling.begin(service.engine, body.ranks, body.skip, body.steps)
    return _json({"ranks": body.ranks, "skip": body.skip, "steps": body.steps})


# ---- events ---------------------------------------------------------------------------------------------------------


async def events(http: web.Request) -> web.StreamResponse:
    service = http.app[SERVICE]
    kinds = _kinds(http.query.get("kinds", ""))
    subscriber = Subscriber(kinds, http.query.get("run", ""))
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-cache"})
    await response.prepare(http)
    service.hub.subscribe(subscriber)
    try:
        if subscriber.wants("state", None):
            subscriber.put("state", dumps({"event": "state", **service.state()}) + b"\n")
        while not http.app[SHUTDOWN].is_set():
            await response.write(await subscriber.lines(QUIET_S))
    finally:
        service.hub.unsubscribe(subscriber)
    return response


def _kinds(text: str) -> list[str]:
    kinds = [kind for kind in text.split(",") if kind]
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ApiError(400, f"There is no kind of event {unknown[0]!r}: there are {', '.join(KINDS)}.", "kinds")
    return kinds


# ---- drills, links, end ---------------------------------------------------------------------------------------------


async def fault(http: web.Request) -> web.Response:
    service = http.app[SERVICE]
    body: FaultBody = await _read(http, FaultBody)
    if body.kind not in FAULTS:
        raise ApiError(400, f"There is no fault {body.kind!r}: there are {', '.join(FAULTS)}.", "kind")
    await service.until_ready()
    num_ranks = service.state()["num_ranks"]
    if not 0 <= body.rank < num_ranks:
        raise ApiError(400, f"There is no rank {body.rank}: this pool has 0 to {num_ranks - 1}.", "rank")
    service.inject(body.rank, body.kind, body.seconds, body.layer)
    return _json({"rank": body.rank, "kind": body.kind})


async def links(http: web.Request) -> web.Response:
    body: LinksBody = await _read(http, LinksBody)
    for link in body.links:
        if not link.url.startswith(("http://", "https://", "/")):
            raise ApiError(400, f"{link.url!r} is not a link: it must begin with http://, https:// or /.", "links")
    service = http.app[SERVICE]
    service.links = [msgspec.to_builtins(link) for link in body.links]
    service.publish_state()
    return _json({"links": service.links})


async def shutdown(http: web.Request) -> web.Response:
    http.app[SHUTDOWN].set()
    return _json({"stopping": True})
