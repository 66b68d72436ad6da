"""Every refusal is an OpenAI error object whose message is a sentence: what was given, what is allowed, what to do."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "BadRequestError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """Ends a request with `status` and a sentence; `param` names the field that was wrong."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(error: ApiError) -> web.Response:
    body = json.dumps(error_body(error.status, error.message, error.param), ensure_ascii=False)
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 503:
        headers["Retry-After"] = "2"
    return web.Response(status=error.status, text=body, content_type="application/json", headers=headers)
