"""Replicas of `moe serve` behind one address, on Ray Serve (``pip install 'ray[serve]'``).

    serve run examples.ray_serve:build model=examples/demo-model max_replicas=4
    curl http://127.0.0.1:8000/v1/completions --json '{"prompt": "def main():", "max_tokens": 20}'

`FrontDoor` takes requests and gives each to a `Replica`, which runs a whole server of its own.

- Autoscaling: `ByWaitingTokens` adds replicas while more than ``waiting_tokens`` prompt tokens a
  replica wait to be read, and removes one when none wait and the rest have room.
- Prefix-aware routing: Ray Serve's `ConsistentHashRouter` sends what begins alike (a conversation,
  by the header ``x-session-id``, by ``prompt_cache_key``, or by its first message) to the same
  replica, whose prefix cache has its keys and values; to the next one where that is full. Ray's
  `PrefixCacheAffinityRouter` needs vLLM or SGLang to be importable, so it is not used here.
- A replica that is lost: requests of which the client has seen nothing are sent to another, up to
  `RETRIES` times; a stream that has begun ends with an error event, so that its client knows.
- Rolling update and draining: deploy again with other settings (``serve run``, ``serve deploy``).
  Ray starts new replicas before old ones go, which get no new requests and as long to finish as
  ``server.drain_timeout_s`` says.

Ray starts workers with the niceness 15, and beside any busy process they get next to nothing: start
Ray with ``RAY_worker_niceness=0`` where replicas compute on CPUs (``ray start``, or before
``serve run`` where that starts Ray itself).

With ``MOE_API_KEY`` set for the cluster, clients must send that key.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import httpx
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from moe import MoE
from moe.loading.local import public_name
from moe.server.guard import LOOPBACK_NAMES
from moe.server.keys import make_keys
from moe.server.listener import bind
from moe.server.serve import Service
from moe.settings import ServerSettings
from moe.settings.profile import load_profile

RETRIES = 3
RETRY_AFTER_S = 0.5
MAX_BODY_BYTES = ServerSettings().max_body_bytes
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
_PASSED_ON = frozenset(
    {"authorization", "x-api-key", "content-type", "traceparent", "tracestate", "anthropic-version"}
)
_LOST = (RayActorError, BackPressureError)


class Settings(BaseModel):
    """What ``serve run examples.ray_serve:build`` takes, as ``name=value``.

    Attributes:
        model: directory or hub id.
        profile: name or file of a profile.
        set: keys of the profile, of every replica.
        min_replicas, max_replicas: bounds of autoscaling.
        waiting_tokens: prompt tokens a replica that may wait before another replica is started.
        requests: that a replica answers together with room to spare; fewer replicas must do with
            that before one is removed.
        num_cpus, num_gpus: of a replica, for Ray's placement.
        upscale_delay_s, downscale_delay_s: for how long that must last.
        look_back_s: waiting tokens are averaged over this time.
    """

    model: str
    profile: str = "default"
    set: dict[str, Any] = {}
    min_replicas: int = 1
    max_replicas: int = 4
    waiting_tokens: int = 8192
    requests: int = 32
    num_cpus: float = 1
    num_gpus: float = 0
    upscale_delay_s: float = 5
    downscale_delay_s: float = 120
    look_back_s: float = 10


class ByWaitingTokens:
    """Ray's autoscaling policy; see the arguments of `Settings`."""

    def __init__(self, waiting_tokens: int, requests: int) -> None:
        self._waiting_tokens, self._requests = waiting_tokens, requests

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now = context.current_num_replicas
        waiting = sum((context.aggregated_metrics or {}).get("waiting_tokens", {}).values())
        wanted = now
        if waiting > now * self._waiting_tokens:
            wanted = -int(-waiting // self._waiting_tokens)
        elif waiting < 1 and context.total_num_requests <= (now - 1) * self._requests:
            wanted = now - 1
        return wanted, {}


class Head(NamedTuple):
    """The beginning of a replica's answer."""

    status: int
    headers: dict[str, str]


@serve.deployment
class Replica:
    """A server of the model on a loopback port of its own.

    Args:
        model: directory or hub id.
        profile: name or file of a profile.
        changes: keys of it that differ.
    """

    def __init__(self, model: str, profile: str, changes: dict[str, Any]) -> None:
        loaded = load_profile(profile, changes)
        keys = make_keys(os.environ.get("MOE_API_KEY"), None)
        load = partial(MoE.from_pretrained, model, loaded)
        self._service = Service(
            lambda report: load(progress=report),
            [public_name(model)],
            loaded,
            bind("127.0.0.1", 0),
            keys,
        )
        self._drain_s = loaded.profile.server.drain_timeout_s
        self._ready = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="moe-server", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        self._http = httpx.AsyncClient(base_url=self._service.address, timeout=None)

    def _run(self) -> None:
        try:
            asyncio.run(self._service.run(self._ready.set))
        except Exception as error:
            self._failure = error
        self._ready.set()

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncGenerator[Head | bytes, None]:
        """The server's answer: a `Head`, and then its body in parts."""
        async with self._http.stream(method, path, headers=headers, content=body) as response:
            yield Head(response.status_code, {"content-type": response.headers["content-type"]})
            async for part in response.aiter_raw():
                yield part

    async def check_health(self) -> None:
        """Called by Ray: a replica that raises is replaced."""
        if not self._thread.is_alive():
            raise RuntimeError("the server has ended")
        if (await self._http.get("/ready")).status_code != 200:
            raise RuntimeError("the server is not ready")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray."""
        assert self._service.queue is not None
        return {"waiting_tokens": self._service.queue.occupancy().get("waiting_tokens", 0)}

    def __del__(self) -> None:
        """Called by Ray when the replica's requests are answered, or their time is up."""
        self._service.stop()
        self._thread.join(self._drain_s)


@serve.deployment(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})
class FrontDoor:
    """Gives each request to a replica.

    Args:
        replicas: of `Replica`.
    """

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)
        # As in `moe serve`: without a key, web pages must not come by a name of their own.
        self._names = None if os.environ.get("MOE_API_KEY") else LOOPBACK_NAMES

    async def __call__(self, request: Request) -> Response:
        """Return what a replica answers; 503 if none did."""
        name = request.headers.get("host", "").rpartition(":")[0]
        if self._names is not None and name not in self._names:
            return _error(400, "the Host header names another host; set MOE_API_KEY", "wrong_host")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _error(413, f"a body has at most {MAX_BODY_BYTES} bytes", "body_too_large")
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: text for name, text in request.headers.items() if name in _PASSED_ON}
        handle = self._replicas.options(session_id=session_of(request.headers, body))
        for attempt in range(RETRIES + 1):
            parts = aiter(handle.answer.remote(request.method, path, headers, body))
            try:
                head = await anext(parts)
                if head.status == 503 and attempt < RETRIES:  # it drains, or has failed
                    await asyncio.sleep(RETRY_AFTER_S)
                    continue
                if not head.headers["content-type"].startswith("text/event-stream"):
                    whole = b"".join([part async for part in parts])
                    return Response(whole, head.status, head.headers)
                first = await anext(parts, b"")
            except _LOST:
                await asyncio.sleep(RETRY_AFTER_S)
                continue
            return StreamingResponse(_stream(first, parts), head.status, head.headers)
        return _error(503, f"{RETRIES + 1} replicas were lost or refused; ask again", "no_replica")


async def _stream(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for part in parts:
            yield part
    except _LOST:
        error = {"message": "the replica was lost; ask again", "code": "replica_lost"}
        yield f"data: {json.dumps({'error': error})}\n\n".encode()


def _error(status: int, message: str, code: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": code}}, status)


def session_of(headers: Mapping[str, str], body: bytes) -> str:
    """The same for requests that are likely to begin with the same tokens."""
    if own := headers.get("x-session-id"):
        return own
    try:
        fields = json.loads(body)
    except ValueError:
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    if own := fields.get("prompt_cache_key"):
        return str(own)
    texts = [fields.get(name) for name in ("system", "instructions", "prompt", "input")]
    messages = fields.get("messages")
    if isinstance(messages, list):  # up to the first of the user, which all later turns have too
        users = [
            at for at, each in enumerate(messages) if isinstance(each, dict) and _is_user(each)
        ]
        texts.append(messages[: users[0] + 1 if users else 1])
    start = [json.dumps(text)[:2048] for text in texts]
    return hashlib.sha256("\n".join(start).encode()).hexdigest()


def _is_user(message: dict[str, Any]) -> bool:
    return message.get("role") == "user"


def build(settings: Settings) -> serve.Application:
    """The application that ``serve run`` starts."""
    loaded = load_profile(settings.profile, settings.set).profile
    replica = cast(Any, Replica).options(
        max_ongoing_requests=loaded.server.max_waiting + loaded.engine.max_batch_size,
        graceful_shutdown_timeout_s=loaded.server.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            look_back_period_s=settings.look_back_s,
            metrics_interval_s=min(1.0, settings.look_back_s / 3),
            policy=AutoscalingPolicy(
                policy_function=ByWaitingTokens,
                policy_kwargs={
                    "waiting_tokens": settings.waiting_tokens,
                    "requests": settings.requests,
                },
            ),
        ),
    )
    return cast(Any, FrontDoor).bind(replica.bind(settings.model, settings.profile, settings.set))
