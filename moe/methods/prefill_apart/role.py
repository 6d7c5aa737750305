"""Keys and values of a prompt from another server: the roles of both (`make_role`).

The decode server is the front door. It asks a prefill server for a long prompt's keys and values
(``POST /v1/prefill``), puts them into its prefix cache, and goes on from there: the engine finds a
known prefix, and reads what follows the last whole block itself. What fails in between costs
nothing but time, as the engine then reads the prompt.

Both know ``MOE_LAUNCH_SECRET``. A request carries a code of its body by that secret, each block of
an answer one of itself, its place and the request, so neither is taken from a stranger, nor damaged
ones. An answer is a stream: `_ALIVE` once in a while as long as the prompt is read, then `_ROWS`,
and of each block its length (4 bytes, little-endian), its bytes (`moe.kv.block_codec`, as on
disk) and its code. A server that says nothing for `parallel.timeout_s`, or is slower than `SLOWEST`
whatever it says, counts as gone.

What is on its way has a reservation in the prefix cache, and so is inside the memory plan: it waits
for room there, and gives way as other prefixes do. The prompt is then read here.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.client
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import torch
from fastapi import APIRouter
from prometheus_client import Counter
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kernels.cpu.kv import BLOCK
from moe.engine.engine import Engine, StepLoop
from moe.engine.prefill_batch import SequenceGroup
from moe.errors import ProfileError, UnsupportedModelError
from moe.kv.block_codec import decode_block, encode_block
from moe.kv.cache import KVCache
from moe.kv.prefix_cache import PrefixCache, Reservation
from moe.loading.prefix_key import settings_of_bits
from moe.model import MoE
from moe.network.moe_layer import run_experts
from moe.sampling.params import SamplingParams
from moe.server.bodies import RequestBody, parse, read_body
from moe.server.engine_queue import EngineQueue
from moe.server.engine_thread import GenerationJob
from moe.server.errors import APIError
from moe.server.fields import Items
from moe.server.guard import logger
from moe.server.roles import ServerRole
from moe.settings import Profile
from offload.errors import OffloadError
from routing import Routing

ROUTE = "/v1/prefill"
AT_ONCE = 4
"""Prompts that a decode server fetches at a time."""
SLOWEST = 20.0
"""Tokens a second, its queue included. A slower answer is given up, and the prompt read here."""
REST_S = 5.0
"""For so long a server that failed is not asked."""
_ALIVE, _ROWS = b"\0", b"\1"
_ALIVE_S = 1.0
_CODE = hashlib.sha256().digest_size
_SPARE_BYTES = 1 << 20
_SAMPLED = 64  # numbers of each weight in a fingerprint
_SAMPLED_EXPERTS = 4  # of each layer
Result = TypeVar("Result")


@torch.inference_mode()
def fingerprint(model: MoE) -> str:
    """A digest that is equal on servers that may exchange keys and values.

    It covers the configuration, the settings, how rows are stored, the bits of experts, what some
    experts of each layer make of a fixed row, bit by bit, and numbers from every other weight.

    Call it between two steps: it may read experts from disk. Raises `OffloadError`.
    """
    config = model.config.to_dict()
    for changes in ("_name_or_path", "transformers_version"):
        config.pop(changes, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(json.dumps(settings_of_bits(model.profile.profile)).encode())
    blocks = model.backbone.blocks
    digest.update(repr(blocks.form if blocks is not None else KVCache.form).encode())
    digest.update(json.dumps(model.expert_layout()["layers"]).encode())
    for name, tensor in sorted(model.backbone.model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(flat.numel() // _SAMPLED, 1)].contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    trunk = model.backbone.model
    for layer in model.experts.layers:
        row = torch.linspace(-1, 1, layer.hidden_size, dtype=trunk.dtype, device=trunk.device)[None]
        step = -(-layer.num_experts // _SAMPLED_EXPERTS)
        for expert in range(0, layer.num_experts, step):
            only = Routing(torch.tensor([[expert]]), torch.ones(1, 1))
            only = Routing(only.expert_ids.to(trunk.device), only.weights.to(trunk.device))
            made = run_experts(row, only, layer, model.experts.forward).cpu()
            digest.update(made.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_model(model: MoE) -> None:
    """Raises `UnsupportedModelError` if the model's prompts cannot be read elsewhere."""
    backbone = model.backbone
    if not backbone.can_cut or backbone.recurrent:
        raise UnsupportedModelError(
            "methods.prefill_apart.role hands on keys and values of attention, and this model "
            "keeps states besides, or cannot go on after a known prefix: set it to both"
        )


class _RefusedError(ValueError):
    """A server will not read this prompt; it may read others."""


_FAULTS = (OSError, ValueError, http.client.HTTPException, OffloadError)


class PrefillRequest(RequestBody):
    """The body that a decode server sends."""

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


def make_role(profile: Profile) -> ServerRole:
    """Return the role that the profile asks for.

    Raises `ProfileError` without a prefix cache, or without the secret that the servers share.
    """
    role = profile.methods.prefill_apart.role
    if not profile.memory.prefix_tokens:
        raise ProfileError(
            f"methods.prefill_apart.role: {role} hands keys and values from one prefix cache to "
            "another: it needs memory.prefix_tokens: at least the longest prompt; set that, or "
            "methods.prefill_apart.role: both"
        )
    secret = os.environ.get("MOE_LAUNCH_SECRET", "")
    if not secret:
        raise ProfileError(
            "methods.prefill_apart.role is not both: set MOE_LAUNCH_SECRET to the same text for "
            "the decode server and its prefill servers, by which they know each other"
        )
    kinds: dict[str, type[_Role]] = {"decode": DecodeRole, "prefill": PrefillRole}
    return kinds[role](profile, secret)


class _Role:
    """The common part of both roles.

    Args:
        profile: of this server.
        secret: that the servers share.
    """

    router: APIRouter | None = None

    def __init__(self, profile: Profile, secret: str) -> None:
        self._settings = profile.methods.prefill_apart
        self._timeout_s = profile.parallel.timeout_s
        self._secret = secret.encode()
        self._fingerprint = ""

    def attach(self, queue: EngineQueue) -> None:
        self._queue = queue

    def check(self, model: MoE) -> None:
        check_model(model)

    async def before(self, groups: Sequence[SequenceGroup]) -> None:
        pass

    def close(self) -> None:
        pass

    async def fingerprint(self) -> str:
        """The `fingerprint` of this server's model. Slow the first time."""
        if not self._fingerprint:
            parts = map(fingerprint, [self._queue.ready_model()])
            (self._fingerprint,) = await self._queue.beside(parts)
        return self._fingerprint

    def ask(self, work: Callable[[PrefixCache], Result]) -> asyncio.Future[Result]:
        """Run work on the prefix cache, between two steps."""
        return self._queue.ask(partial(_with_prefixes, work))


def _with_prefixes(work: Callable[[PrefixCache], Result], engine: StepLoop) -> Result:
    assert isinstance(engine, Engine)
    assert engine.scheduler.prefixes is not None
    return work(engine.scheduler.prefixes)


class DecodeRole(_Role):
    """The decode server's side. Lives in the event loop; fetches in threads of its own."""

    def __init__(self, profile: Profile, secret: str) -> None:
        super().__init__(profile, secret)
        self._servers = [_Server(url.rstrip("/")) for url in self._settings.servers]
        self._threads = ThreadPoolExecutor(AT_ONCE, "moe-prefill")
        self._free = asyncio.Semaphore(AT_ONCE)
        self.outcomes = Counter(
            "moe_remote_prefills",
            "Prompts asked of prefill servers: fetched, or failed and read here",
            ["outcome"],
            registry=None,
        )

    def attach(self, queue: EngineQueue) -> None:
        super().attach(queue)
        queue.metrics.registry.register(self.outcomes)

    async def before(self, groups: Sequence[SequenceGroup]) -> None:
        """Put the beginnings of long prompts into the prefix cache, as far as servers give them."""
        for group in groups:
            # Else every token is read here. The other server has no images.
            if group.prompt_logprobs is None and group.rows is None:
                async with self._free:
                    await self._fetch_one(group)

    async def _fetch_one(self, group: SequenceGroup) -> None:
        model, salt = self._queue.ready_model(), group.sequences[0].salt
        length = (len(group.token_ids) - 1) // BLOCK * BLOCK
        token_ids = group.token_ids[:length]
        known = await self.ask(lambda prefixes: prefixes.num_cached(salt, group.token_ids))
        servers = [each for each in self._servers if each.rests_until <= time.monotonic()]
        if length - known < self._settings.tokens or not servers:
            return
        room = await self.ask(lambda prefixes: prefixes.reserve(length))
        if room is None:  # it would not fit beside others that are on their way
            return
        server = min(servers, key=lambda each: each.asked)
        server.asked += 1
        try:
            own = await self.fingerprint()
            cache = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._fetch, model, own, server, group, token_ids, room.stop
            )
            if cache is not None and await self._keep(salt, token_ids, cache, room):
                self.outcomes.labels("fetched").inc()
        except _FAULTS as error:
            if not isinstance(error, _RefusedError):
                server.rests_until = time.monotonic() + REST_S
            self.outcomes.labels("failed").inc()
            logger.warning("prefill server %s: %s; prompts are read here", server.url, error)
        finally:
            room.stop.set()
            self.ask(lambda prefixes: prefixes.release(room))
            server.asked -= 1

    async def _keep(
        self, salt: str, token_ids: list[int], cache: KVCache, room: Reservation
    ) -> bool:
        """Put the state after these tokens into the prefix cache, in place of its reservation;
        False: that has given way to requests."""

        def keep(prefixes: PrefixCache) -> bool:
            kept = prefixes.release(room)
            if kept:
                prefixes.add(salt, token_ids, cache)
            return kept

        return await self.ask(keep)

    def _fetch(
        self,
        model: MoE,
        own: str,
        server: _Server,
        group: SequenceGroup,
        token_ids: list[int],
        stop: threading.Event,
    ) -> KVCache | None:
        """Ask a server for a prompt's keys and values.

        Returns:
            None: nobody waits for them any more, or one of the servers has no room.

        Args:
            own: the fingerprint of this server's model.
        """
        first, nonce = group.sequences[0], secrets.token_hex(16)
        question = {"tokens": token_ids, "salt": first.salt, "priority": first.priority}
        body = json.dumps(question | {"model": own, "nonce": nonce}).encode()
        connection = server.connect(self._timeout_s)
        with _within(self._timeout_s + len(token_ids) / SLOWEST, connection):
            code = hmac.digest(self._secret, body, "sha256").hex()
            headers = {"content-type": "application/json", "x-moe-code": code}
            connection.request("POST", ROUTE, body, headers)
            response = connection.getresponse()
            if response.status in (429, 503):  # busy, or not ready yet
                return None
            if response.status != 200:
                said = response.read(1000).decode(errors="replace")
                raise _RefusedError(f"it answers {response.status}: {said!r}")
            return self._receive(model, response, nonce, token_ids, stop)

    def _receive(
        self,
        model: MoE,
        response: http.client.HTTPResponse,
        nonce: str,
        token_ids: list[int],
        stop: threading.Event,
    ) -> KVCache | None:
        """Return the keys and values in an answer; None: nobody waits for it any more, or the
        server has
        no room. Raises `ValueError` if they are not from a server of ours."""
        while (mark := response.read(1)) == _ALIVE:
            if stop.is_set():
                return None
        if not mark:
            return None
        cache = model.backbone.new_cache(len(token_ids)).kv
        most = 4 * BLOCK * model.memory_plan.kv_bytes_per_token + _SPARE_BYTES
        for begin in range(0, len(token_ids), BLOCK):
            if stop.is_set():
                return None
            content = _read_block(response, most, partial(_code, self._secret, nonce, begin))
            block = decode_block(content, token_ids[begin : begin + BLOCK])
            if not cache.append_block(block, model.backbone.device):
                raise ValueError("its blocks have another layout, or rows that are no numbers")
        return cache

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _within(seconds: float, connection: http.client.HTTPConnection) -> Iterator[None]:
    """Connect, and end what is done with the connection after so many seconds: whoever sends a byte
    now and then never falls silent. Raises TimeoutError then."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        with suppress(OSError):  # it has ended itself
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    try:
        connection.connect()
        sock = connection.sock
        timer.start()
        yield
    except _FAULTS as error:
        if late.is_set():
            raise TimeoutError(f"its answer takes longer than {seconds:.0f} s") from error
        raise
    finally:
        timer.cancel()
        connection.close()
    if late.is_set():
        raise TimeoutError(f"its answer takes longer than {seconds:.0f} s")


def _read_block(
    response: http.client.HTTPResponse, most: int, code_of: Callable[[bytes], bytes]
) -> bytes:
    """The bytes of the next block. Raises `ValueError` if they are not from a server of ours."""

    def read(size: int) -> bytes:
        data = response.read(size)
        if len(data) < size:
            raise ValueError("its answer broke off")
        return data

    size = int.from_bytes(read(4), "little")
    if size > most:
        raise ValueError(f"it sends a block of {size} bytes, more than {most}")
    content = read(size)
    if not hmac.compare_digest(read(_CODE), code_of(content)):
        raise ValueError("its answer is damaged, or not from a server that knows the secret")
    return content


def _code(secret: bytes, nonce: str, begin: int, *parts: bytes | memoryview) -> bytes:
    """The code of a block that begins at this token of the prompt."""
    made = hmac.new(secret, f"{nonce} {begin} ".encode(), "sha256")
    for part in parts:
        made.update(part)
    return made.digest()


class PrefillRole(_Role):
    """The prefill server's side: one more route."""

    def __init__(self, profile: Profile, secret: str) -> None:
        super().__init__(profile, secret)
        self._limits = profile.server
        self.router = APIRouter()
        self.router.add_api_route(ROUTE, self.prefill, methods=["POST"], include_in_schema=False)

    async def prefill(self, request: Request) -> Response:
        """Answer with keys and values of a prompt, for a decode server that knows the secret."""
        body = await read_body(request, self._limits.max_body_bytes, self._limits.read_timeout_s)
        sent = request.headers.get("x-moe-code", "")
        code = hmac.digest(self._secret, body, "sha256").hex()
        if not hmac.compare_digest(sent.encode(), code.encode()):
            message = "the servers do not share MOE_LAUNCH_SECRET"
            raise APIError(401, message, code="invalid_api_key")
        request.state.body_bytes = len(body)
        wanted = await run_in_threadpool(parse, PrefillRequest, body)
        if wanted.model != await self.fingerprint():
            message = "the servers have different models, or different settings of them"
            raise APIError(400, message, code="model_not_found")
        if not wanted.tokens or len(wanted.tokens) % BLOCK:
            raise APIError(400, f"tokens must be a multiple of {BLOCK}", param="tokens")
        params = SamplingParams(max_new_tokens=1, temperature=0.0)

        def build(model: MoE) -> list[SequenceGroup]:
            return [model.request(wanted.tokens, params, wanted.salt, wanted.priority)]

        job = await self._queue.submit(build, heavy=True)
        return StreamingResponse(self._answer(job, wanted), media_type="application/octet-stream")

    async def _answer(
        self, job: GenerationJob, wanted: PrefillRequest
    ) -> AsyncIterator[bytes | memoryview]:
        async def rows() -> KVCache | None:
            async for _ in job.events():
                pass
            return await self.ask(lambda prefixes: prefixes.copy_of(wanted.salt, wanted.tokens))

        task = asyncio.ensure_future(rows())
        try:
            while not task.done():
                yield _ALIVE
                await asyncio.wait({task}, timeout=_ALIVE_S)
            cache = task.result()
            if cache is None or not cache.whole:  # evicted meanwhile, or too large for the cache
                return
            yield _ROWS
            for begin in range(0, cache.length, BLOCK):
                ids = wanted.tokens[begin : begin + BLOCK]
                block = cache.stored_block(begin // BLOCK)
                parts = await run_in_threadpool(encode_block, block, ids)
                size = sum(map(len, parts))
                code = await run_in_threadpool(_code, self._secret, wanted.nonce, begin, *parts)
                for part in (size.to_bytes(4, "little"), *parts, code):
                    yield part
        finally:
            task.cancel()
            self._queue.close(job)
