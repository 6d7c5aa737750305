"""Images that requests link to, fetched where ``server.allow_image_urls`` allows it.

Strangers choose these links, so a link must not lead into the server's own network: each name is
looked up once, every address that it has must be public and another machine's, and the connection
goes to the address that was checked, at a port of the web. A redirect is a link like any other.
Files are never opened, and no proxy, cookie or password is used. Callers share the threads that
look names up, as that may take long. Bytes, seconds, redirects and requests that fetch at a time
are limited; what comes back is decoded like an image that was sent (`moe.images.decode`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import h11
from starlette.requests import Request

from moe.errors import RequestError
from moe.fair_pool import FairPool
from moe.images.decode import MAX_IMAGES
from moe.server.keys import caller_of
from moe.server.openai.request import ChatMessage

SECONDS = 20.0
"""For all links of a request together, redirects and waiting for others included."""
REDIRECTS = 3
AT_ONCE = 16
"""Requests whose links are fetched at a time."""
PORTS = {80, 443}
"""Ports that links may name."""
_PORTS = {"http": 80, "https": 443}
_MOVED = {301, 302, 303, 307, 308}
_HEADER_BYTES = 16384
_SAFE = "/?%:@!$&'()*+,;=-._~[]"  # characters that a target keeps as they are
_NOT_PUBLIC = [
    # IPv4: "this" network, private, loopback, multicast, reserved.
    *(ipaddress.ip_network((n << 24, bits)) for n, bits in ((0, 8), (10, 8), (127, 8), (224, 3))),
    *map(
        ipaddress.ip_network,
        (
            # Private, shared, link-local, of IETF's protocols and clouds' metadata (192.0.0.192),
            # examples, relays of 6to4, benchmarks.
            *("172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"),
            *("192.0.0.0/24", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),
            *("192.88.99.0/24", "198.18.0.0/15"),
            "168.63.129.16/32",  # what Azure's machines ask, at an address like any other
            # IPv6, within 2000::/3: Teredo and other protocols, examples, 6to4.
            *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
        ),
    ),
]
_UNICAST = ipaddress.ip_network("2000::/3")  # all else of IPv6 is local, translated or reserved
_LOOK_UPS = FairPool(8, "moe-names", each=2)


class _RefusedError(Exception):
    """Why a link gives no image, for the client."""


async def fetch_images(request: Request, messages: Sequence[ChatMessage]) -> None:
    """Replace each link to an image in these messages by the bytes behind it.

    Does nothing where the profile allows no links, or the model reads no images: what reads the
    prompt refuses them then.

    Raises:
        RequestError: a link is not allowed, or there is no image behind it in time.
        APIError: 503, requests hold all memory that is for them.
    """
    state = request.app.state
    links = list(_links(messages))
    model = state.queue.model
    if not links or not state.settings.allow_image_urls or model is None:
        return
    if isinstance(model.codec.images, str) or len(links) > MAX_IMAGES:
        return
    try:
        await asyncio.wait_for(_fetch_all(request, links), SECONDS)
    except asyncio.TimeoutError:
        raise RequestError(
            f"the prompt's links to images took more than {SECONDS:g} s; send the images themselves"
        ) from None


def _links(messages: Sequence[ChatMessage]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parts that link to images, each with its number among the prompt's images."""
    images = (
        part
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if part["type"] == "image_url"
    )
    for number, part in enumerate(images):
        if part["image_url"]["url"][:8].lower().startswith(("http://", "https://")):
            yield number, part


async def _fetch_all(request: Request, links: Sequence[tuple[int, dict[str, Any]]]) -> None:
    state = request.app.state
    left = state.settings.max_body_bytes
    known = dict[str, bytes]()

    def count(size: int) -> None:
        nonlocal left
        left -= size
        if left < 0:
            raise _RefusedError(
                f"the images that a prompt links to may have {state.settings.max_body_bytes} bytes "
                "together (server.max_body_bytes)"
            )
        state.queue.memory.take_within(request.scope["request_id"], size)

    async with state.image_links:
        for number, part in links:
            url = part["image_url"]["url"]
            try:
                if url not in known:
                    known[url] = await fetch(url, count, caller_of(request))
            except _RefusedError as error:
                raise RequestError(
                    f"image {number} of the prompt cannot be fetched: {error}"
                ) from error
            part.clear()
            part.update(type="image", image=known[url])


async def fetch(url: str, count: Callable[[int], None], caller: str = "") -> bytes:
    """The bytes behind a link.

    Args:
        count: called with the number of bytes of each piece; may raise.
        caller: whose turn it is when names are looked up.
    """
    for _ in range(REDIRECTS + 1):
        try:
            status, moved, data = await _get(_checked(url), count, caller)
        except (OSError, h11.ProtocolError) as error:
            raise _RefusedError(f"its host gives no answer ({type(error).__name__})") from error
        if status == 200:
            return data
        if status not in _MOVED or not moved:
            raise _RefusedError(f"its host answers with status {status}")
        url = urljoin(url, moved)
    raise _RefusedError(f"it is redirected more than {REDIRECTS} times")


def _checked(url: str) -> SplitResult:
    """The parts of a link that may be opened."""
    try:
        parts = urlsplit(url)
        named = parts.hostname and parts.port != 0
    except ValueError:
        named, parts = False, SplitResult("", "", "", "", "")
    if parts.scheme not in _PORTS or not named:
        raise _RefusedError("links must begin with http:// or https://, and name a host")
    if parts.port not in (None, *PORTS):
        raise _RefusedError("links must have the port 80 or 443")
    if parts.username is not None or parts.password is not None:
        raise _RefusedError("links must have no user and no password")
    return parts


async def _get(
    url: SplitResult, count: Callable[[int], None], caller: str
) -> tuple[int, str, bytes]:
    """Status, ``Location`` and, for status 200, the body."""
    secure = url.scheme == "https"
    port = url.port or _PORTS[url.scheme]
    try:
        host = str(url.hostname).encode("idna").decode()
    except UnicodeError as error:
        raise _RefusedError("its host's name is not valid") from error
    reader, writer = await asyncio.open_connection(
        await public_address(host, port, caller),
        port,
        ssl=_tls() if secure else None,
        server_hostname=host if secure else None,
    )
    try:
        client = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEADER_BYTES)
        target = quote(url.path or "/", safe=_SAFE)
        if url.query:
            target += "?" + quote(url.query, safe=_SAFE)
        headers = {
            "Host": f"[{host}]" if ":" in host else host,
            "User-Agent": "moe",
            "Accept": "image/png, image/jpeg, image/webp",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        if port != _PORTS[url.scheme]:
            headers["Host"] += f":{port}"
        asking = h11.Request(method="GET", target=target, headers=list(headers.items()))
        writer.write((client.send(asking) or b"") + (client.send(h11.EndOfMessage()) or b""))
        return await _answer(client, reader, count)
    finally:
        writer.transport.abort()


async def _answer(
    client: h11.Connection, reader: asyncio.StreamReader, count: Callable[[int], None]
) -> tuple[int, str, bytes]:
    data = bytearray()
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            client.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Response) and event.status_code != 200:
            moved = dict(event.headers).get(b"location", b"")
            return event.status_code, moved.decode("latin-1"), b""
        elif isinstance(event, h11.Data):
            count(len(event.data))
            data += event.data
        elif isinstance(event, h11.EndOfMessage):
            return 200, "", bytes(data)


async def public_address(host: str, port: int, caller: str = "") -> str:
    """An address of a host. Raises if one of those that it has is not public, or is ours.

    Args:
        caller: whose turn it is; callers share the threads that look names up.
    """
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.wrap_future(_LOOK_UPS.submit(caller, look_up))
    addresses = [str(address[0]) for *_, address in found]
    if not addresses or not all(map(is_public, addresses)) or any(map(is_own, addresses)):
        raise _RefusedError("its host has an address that is not public")
    return addresses[0]


def is_public(text: str) -> bool:
    """Return whether an address is public, and stands for no other that may not be."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        if address not in _UNICAST:
            return False
    return not any(address in network for network in _NOT_PUBLIC)


def is_own(text: str) -> bool:
    """Return whether an address is one of this machine's: only those can be bound."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((text, 0))
        except OSError:
            return False
    return True


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
