"""Prefill and decode apart (`parallel.role`): keys and values of a prompt from another server.

The decode server is the front door. It asks a prefill server for a long prompt's keys and values
(``POST /v1/prefill``), puts them into its prefix cache, and goes on from there: the engine finds a
known prefix, and reads what is behind the last whole block itself. What fails in between costs
nothing but time, as the engine then reads the prompt.

Both know ``MOE_LAUNCH_SECRET``. A request carries a code of its body by that secret, an answer one
of itself and of the request, so neither is taken from a stranger, nor damaged ones. An answer is a
stream: `_ALIVE` once in a while as long as the prompt is read (a server that says nothing for
`parallel.timeout_s` counts as gone), then `_ROWS`, a safetensors container and the code.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.client
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from fastapi import APIRouter
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load, save
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kernels.cpu.kv import BLOCK
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import UnsupportedModelError
from moe.model import MoE
from moe.network.kv_cache import KVCache
from moe.sampling.params import SamplingParams
from moe.server.bodies import RequestBody, parse, read_body
from moe.server.errors import APIError
from moe.server.fields import Items
from moe.server.guard import logger
from moe.settings import ParallelSettings

if TYPE_CHECKING:
    from moe.server.engine_queue import EngineQueue

ROUTE = "/v1/prefill"
AT_ONCE = 4
"""Prompts that a decode server fetches at a time; until they are there, their memory is in no plan.
"""
REST_S = 5.0
"""For so long a server that failed is not asked."""
_ALIVE, _ROWS = b"\0", b"\1"
_ALIVE_S = 1.0
_CODE = hashlib.sha256().digest_size
_PART = 1 << 20
_SPARE_BYTES = 1 << 20
_SAMPLED = 64  # numbers of each weight in a fingerprint
router = APIRouter()


def fingerprint(model: MoE) -> str:
    """The same for servers whose keys and values may be exchanged: of the configuration, how rows
    are stored, the bits of experts, and numbers from every other weight."""
    config = model.config.to_dict()
    for changes in ("_name_or_path", "transformers_version"):
        config.pop(changes, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    blocks = model.backbone.blocks
    digest.update(repr(blocks.form if blocks is not None else KVCache.form).encode())
    digest.update(json.dumps(model.expert_layout()["layers"]).encode())
    for name, tensor in sorted(model.backbone.model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(flat.numel() // _SAMPLED, 1)].contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_model(model: MoE) -> None:
    """Raises `UnsupportedModelError` if the model's prompts cannot be read elsewhere."""
    backbone = model.backbone
    if not backbone.can_cut or backbone.recurrent:
        raise UnsupportedModelError(
            "parallel.role hands on keys and values of attention, and this model keeps states "
            "besides, or cannot go on behind a known prefix: set parallel.role: both"
        )


class _RefusedError(ValueError):
    """A server will not read this prompt; it may read others."""


_FAULTS = (OSError, ValueError, KeyError, http.client.HTTPException, SafetensorError)


class PrefillRequest(RequestBody):
    """What a decode server asks for."""

    tokens: Items[int]
    salt: str = Field(default="", max_length=1024)
    priority: int = 0
    model: str
    nonce: str = Field(max_length=64)


@dataclass
class _Server:
    """A prefill server, as a decode server knows it."""

    url: str
    asked: int = 0
    rests_until: float = 0.0

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        return kind(parts.hostname or "", parts.port, timeout=timeout_s)


class PrefillClient:
    """The decode server's side. Lives in the event loop; fetches in threads of its own.

    Args:
        settings: who is asked, and for which prompts.
        secret: that the servers share.
    """

    def __init__(self, settings: ParallelSettings, secret: str) -> None:
        self._settings, self._secret = settings, secret.encode()
        self._servers = [_Server(url.rstrip("/")) for url in settings.prefill_servers]
        self._threads = ThreadPoolExecutor(AT_ONCE, "moe-prefill")
        self._fingerprint = ""

    async def fetch_for(self, queue: EngineQueue, groups: Sequence[SequenceGroup]) -> None:
        """Put the beginnings of long prompts into the prefix cache, as far as servers give them."""
        for group in groups:
            if group.prompt_logprobs is None:  # else every token is read here
                await self._fetch_one(queue, group)

    async def _fetch_one(self, queue: EngineQueue, group: SequenceGroup) -> None:
        model, salt = queue.ready_model(), group.sequences[0].salt
        length = (len(group.token_ids) - 1) // BLOCK * BLOCK
        token_ids = group.token_ids[:length]
        known = await queue.num_cached(salt, group.token_ids)
        servers = [each for each in self._servers if each.rests_until <= time.monotonic()]
        if length - known < self._settings.prefill_tokens or not servers:
            return
        server = min(servers, key=lambda each: each.asked)
        stop = threading.Event()
        server.asked += 1
        try:
            cache = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._fetch, model, server, group, token_ids, stop
            )
        except _FAULTS as error:
            if not isinstance(error, _RefusedError):
                server.rests_until = time.monotonic() + REST_S
            queue.metrics.remote_prefills.labels("failed").inc()
            logger.warning("prefill server %s: %s; prompts are read here", server.url, error)
            return
        finally:
            stop.set()
            server.asked -= 1
        if cache is not None:
            queue.metrics.remote_prefills.labels("fetched").inc()
            await queue.keep_prefix(salt, token_ids, cache)

    def _fetch(
        self,
        model: MoE,
        server: _Server,
        group: SequenceGroup,
        token_ids: list[int],
        stop: threading.Event,
    ) -> KVCache | None:
        """None: nobody waits for it any more, or the server has no room."""
        self._fingerprint = self._fingerprint or fingerprint(model)
        first, length = group.sequences[0], len(token_ids)
        nonce = secrets.token_hex(16)
        body = json.dumps(
            {
                "tokens": token_ids,
                "salt": first.salt,
                "priority": first.priority,
                "model": self._fingerprint,
                "nonce": nonce,
            }
        ).encode()
        connection = server.connect(self._settings.timeout_s)
        try:
            code = hmac.digest(self._secret, body, "sha256").hex()
            headers = {"content-type": "application/json", "x-moe-code": code}
            connection.request("POST", ROUTE, body, headers)
            response = connection.getresponse()
            if response.status in (429, 503):  # busy, or not ready yet
                return None
            if response.status != 200:
                said = response.read(1000).decode(errors="replace")
                raise _RefusedError(f"it answers {response.status}: {said}")
            most = 4 * length * model.memory_plan.kv_bytes_per_token + _SPARE_BYTES
            data = _read(response, most, stop)
        finally:
            connection.close()
        if data is None:
            return None
        payload, sent = data[:-_CODE], data[-_CODE:]
        if not hmac.compare_digest(sent, _code(self._secret, nonce, payload)):
            raise ValueError("its answer is damaged, or not from a server that knows the secret")
        cache = model.backbone.new_cache(length)
        assert isinstance(cache, KVCache)
        cache.unpack(load(bytes(payload)), length)
        return cache

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _read(
    response: http.client.HTTPResponse, most: int, stop: threading.Event
) -> memoryview | None:
    """What follows `_ROWS`; None if the caller stopped, or the server gave up."""
    while (mark := response.read(1)) == _ALIVE:
        if stop.is_set():
            return None
    if not mark:
        return None
    data = bytearray()
    while part := response.read(_PART):
        data += part
        if len(data) > most:
            raise ValueError(f"it sends more than {most} bytes")
        if stop.is_set():
            return None
    if len(data) <= _CODE:
        raise ValueError("its answer broke off")
    return memoryview(data)


def _code(secret: bytes, nonce: str, payload: bytes | memoryview) -> bytes:
    made = hmac.new(secret, nonce.encode(), "sha256")
    made.update(payload)
    return made.digest()


@router.post(ROUTE, include_in_schema=False)
async def prefill(request: Request) -> Response:
    """Keys and values of a prompt, for a decode server that knows the secret."""
    settings = request.app.state.settings
    secret: bytes = request.app.state.prefill_secret
    queue: EngineQueue = request.app.state.queue
    body = await read_body(request, settings.max_body_bytes, settings.read_timeout_s)
    sent = request.headers.get("x-moe-code", "")
    if not hmac.compare_digest(sent.encode(), hmac.digest(secret, body, "sha256").hex().encode()):
        raise APIError(401, "the servers do not share MOE_LAUNCH_SECRET", code="invalid_api_key")
    request.state.body_bytes = len(body)
    wanted = await run_in_threadpool(parse, PrefillRequest, body)
    own = await run_in_threadpool(queue.fingerprint)
    if wanted.model != own:
        message = "the servers have different models, or different settings of them"
        raise APIError(400, message, code="model_not_found")
    if not wanted.tokens or len(wanted.tokens) % BLOCK:
        raise APIError(400, f"tokens must be a multiple of {BLOCK}", param="tokens")
    params = SamplingParams(max_new_tokens=1, temperature=0.0)

    def build(model: MoE) -> list[SequenceGroup]:
        return [model.request(wanted.tokens, params, wanted.salt, wanted.priority)]

    job = await queue.submit(build, heavy=True)
    return StreamingResponse(
        _answer(queue, job, wanted, secret), media_type="application/octet-stream"
    )


async def _answer(
    queue: EngineQueue, job: Any, wanted: PrefillRequest, secret: bytes
) -> AsyncIterator[bytes | memoryview]:
    async def rows() -> KVCache | None:
        async for _ in job.events():
            pass
        return await queue.cached_prefix(wanted.salt, wanted.tokens)

    task = asyncio.ensure_future(rows())
    try:
        while not task.done():
            yield _ALIVE
            await asyncio.wait({task}, timeout=_ALIVE_S)
        cache = task.result()
        if cache is None:  # evicted in the meantime, or memory.prefix_tokens is too small for it
            return
        payload = await run_in_threadpool(lambda: save(cache.packed(cache.length)))
        yield _ROWS
        for start in range(0, len(payload), _PART):
            yield memoryview(payload)[start : start + _PART]
        yield _code(secret, wanted.nonce, payload)
    finally:
        task.cancel()
        queue.close(job)
