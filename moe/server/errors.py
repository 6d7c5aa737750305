"""Errors in the shape that clients expect.

On Anthropic's routes that is Anthropic's; on all others OpenAI's
``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from moe.errors import BusyError, ContextError, RequestError, StructureError
from moe.fair_pool import is_shortage
from offload.errors import OffloadError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
GENERIC = "the server failed to answer this request; its log has the details"
UNREADABLE = "weights that this request needs could not be read; the server's log has the details"

_ANTHROPIC_ROUTES = "/v1/messages"
_ANTHROPIC_TYPES = _TYPES | {
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
_TEXT_OR_NULL = {"type": ["string", "null"]}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}


ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def speaks_anthropic(path: str) -> bool:
    """Return whether the clients of a path expect errors in Anthropic's shape."""
    return path.startswith(_ANTHROPIC_ROUTES)


class APIError(Exception):
    """An error answer.

    Args:
        status: HTTP status, 400-599.
        message: for the client; must not reveal the server's internals.
        param: the field of the request that is at fault.
        code: a word that programs can compare.
        retry_after_s: seconds after which the client may try again.
        headers: further headers of the answer.
        to_anthropic: the message for Anthropic's clients; None: the same.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
        to_anthropic: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        self.to_anthropic = message if to_anthropic is None else to_anthropic

    def body(self) -> dict[str, Any]:
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, usual),
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        details = {"details": {"error_code": self.code}} if self.code else {}
        return {"type": "error", "error": {"type": kind, "message": self.to_anthropic, **details}}

    def response(self, path: str, more: Mapping[str, Any] | None = None) -> JSONResponse:
        """The HTTP answer on a path; `more` has further fields beside the error."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        body = self.anthropic_body() if speaks_anthropic(path) else self.body()
        return JSONResponse({**(more or {}), **body}, self.status, headers)


def _context_error(error: ContextError) -> APIError:
    """In the words by which clients know that they have to shorten a conversation, or ask for less:
    those of vLLM and OpenAI, and Anthropic's."""
    limit, prompt, new = error.limit, error.num_prompt, error.num_new
    code = "context_length_exceeded"
    if limit is None:
        return APIError(400, str(error), code=code)
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt + new} tokens ({prompt} in the messages, {new} in the completion). Please reduce "
        f"the length of the messages or completion: {error}"
    )
    if prompt < limit and new:
        told = f"input length and `max_tokens` exceed context limit: {prompt} + {new} > {limit}"
    else:
        most = min(limit, prompt - 1)  # an answer needs a token, too
        told = f"prompt is too long: {prompt} tokens > {most} maximum"
    return APIError(400, message, code=code, to_anthropic=f"{told}; {error}")


class ClientGone(APIError):
    """The client closed the connection before it was answered."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="client_closed_request")


def api_error(error: Exception) -> APIError:
    """The error that a client sees, over HTTP as in a batch. Hides unexpected ones."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, BusyError):
        return APIError(503, str(error), code="busy", retry_after_s=5)
    if isinstance(error, ContextError):
        return _context_error(error)
    if isinstance(error, RequestError):
        code = "structure_too_complex" if isinstance(error, StructureError) else None
        return APIError(400, str(error), code=code)
    if is_shortage(error):  # starlette's threads
        message = "this machine starts no more threads now; try again later"
        return APIError(503, message, code="busy", retry_after_s=5)
    if isinstance(error, OffloadError):
        return APIError(503, UNREADABLE, code="weights_unreadable")
    return APIError(500, GENERIC)
