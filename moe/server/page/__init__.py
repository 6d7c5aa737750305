"""The page at ``/``: a chat, and the experts at work. Off with ``server.page: false``.

`static/` is the whole bundle, served as it lies there: our own modules, and in `vendor/` the
libraries that they use, each with its licence. The page asks no other origin for anything, and its
Content-Security-Policy lets it run no script and apply no style but these files. They hold nothing
of this server, so they need no key; the page sends the key with every request for data.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
PATHS = frozenset(
    ["/", *(f"/page/{file.relative_to(STATIC)}" for file in STATIC.rglob("*") if file.is_file())]
)
_RANGES = (b"range", b"if-range")
_files = StaticFiles(directory=STATIC)
router = APIRouter(include_in_schema=False)


@router.get("/")
async def index(request: Request) -> Response:
    """The page."""
    return await file(request, "index.html")


@router.get("/page/{name:path}")
async def file(request: Request, name: str) -> Response:
    """A file of its bundle."""
    # Whole files only: ranges of a header are the client's to choose, and costly to merge.
    headers = request.scope["headers"]
    request.scope["headers"] = [each for each in headers if each[0] not in _RANGES]
    response = await _files.get_response(name, request.scope)
    response.headers.update(HEADERS)
    response.headers["accept-ranges"] = "none"
    return response
