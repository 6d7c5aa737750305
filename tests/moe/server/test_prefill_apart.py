"""Prefill and decode in two servers: the tokens of one, whatever becomes of the other."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from kernels import ExpertWeights
from moe import MoE
from moe.commands.convert.convert import convert
from moe.errors import ProfileError
from moe.kv.block_codec import encode_block
from moe.kv.layout import StoredBlock
from moe.methods.prefill_apart import role as apart
from moe.server.listener import bind
from moe.server.roles import SERVER_ROLES
from moe.server.serve import Service
from moe.settings import ModelSettings
from moe.settings.profile import load_profile
from offload.layer import held_experts
from tests.launched import Launch, free_port
from tests.moe.server.conftest import Running
from tests.moe.test_offload import SMALL, budget

SECRET = "correct horse battery staple"
URL = "/v1/completions"
ROOM = {"prefix_tokens": 4096, "kv_tokens": 8192}


@contextmanager
def serving(
    checkpoint: Path, role: str = "both", secret: str = SECRET, bits: Any = 32, **own: Any
) -> Iterator[Running]:
    """A server with a role, in a thread."""
    settings = {
        "parallel.timeout_s": 1.0,
        "methods.prefill_apart": {"role": role, "tokens": 64, **own},
        "memory": ROOM | {"kv_bits": bits},
    }
    profile = load_profile(settings, environ={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_LAUNCH_SECRET", secret)
        roles = [make(profile.profile) for make in SERVER_ROLES.filled(profile.profile)]
    running = Running(
        Service(
            lambda _: MoE.from_pretrained(checkpoint, profile),
            ["tiny"],
            profile,
            bind("127.0.0.1", 0),
            roles=roles,
        )
    )
    yield running
    running.stop()


def body(number: int, length: int = 200) -> dict[str, Any]:
    words = f"{number} " + "".join(chr(97 + (number * i * i + i) % 26) for i in range(length))
    return {"prompt": words, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "seed": 1}


def answer(server: Running, what: dict[str, Any]) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were known."""
    got = server.http.post(URL, json=what)
    assert got.status_code == 200, got.text
    found = got.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def outcomes(server: Running) -> dict[str, float]:
    (role,) = server.service.roles
    assert isinstance(role, apart.DecodeRole)
    (family,) = role.outcomes.collect()
    return {s.labels["outcome"]: s.value for s in family.samples if s.name.endswith("_total")}


def serve_command(checkpoint: Path, *settings: str) -> tuple[list[Any], str]:
    """How to start a server as a process, and its address."""
    port = free_port()
    room = (f"memory.{key}={value}" for key, value in (ROOM | {"kv_bits": 32}).items())
    command: list[Any] = ["serve", checkpoint, "--port", port]
    for setting in (*room, *settings):
        command += ["--set", setting]
    return command, f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("bits", [32, 8])
def test_tokens_are_those_of_one_engine(text_checkpoint: Path, bits: int) -> None:
    asked = [body(number, length) for number, length in enumerate((20, 130, 200, 240))]
    with serving(text_checkpoint, bits=bits) as alone:
        expected = [answer(alone, each)[0] for each in asked]
    with ExitStack() as stack:
        prefill = stack.enter_context(serving(text_checkpoint, "prefill", bits=bits))
        decode = stack.enter_context(
            serving(text_checkpoint, "decode", bits=bits, servers=[prefill.url])
        )
        found = [answer(decode, each) for each in asked]
        assert [text for text, _ in found] == expected
        # Whole blocks of 64 tokens came from the other server; the short prompt was read here.
        assert [known for _, known in found] == [0, 128, 192, 192]
        assert outcomes(decode) == {"fetched": 3.0}
        assert answer(decode, asked[2])[0] == expected[2]  # known now
        assert outcomes(decode) == {"fetched": 3.0}
        assert prefill.service.queue is not None
        assert prefill.is_idle()


@pytest.mark.deep
def test_a_killed_prefill_server_costs_nobody_an_answer(
    text_checkpoint: Path, launch: Launch
) -> None:
    asked = [body(number) for number in range(24)]
    with serving(text_checkpoint) as alone:
        expected = [answer(alone, each)[0] for each in asked]
    command, url = serve_command(text_checkpoint, "methods.prefill_apart.role=prefill")
    with (
        launch(1, command, MOE_LAUNCH_SECRET=SECRET) as prefill,
        serving(text_checkpoint, "decode", servers=[url]) as decode,
        ThreadPoolExecutor(8) as pool,
    ):
        prefill.wait_for("serving")
        assert answer(decode, asked[0]) == (expected[0], 192)
        going = [pool.submit(answer, decode, each) for each in asked[1:]]
        going[2].result()
        prefill.signal(0, signal.SIGKILL)
        assert [each.result()[0] for each in going] == expected[1:]
        assert decode.is_idle()
        assert outcomes(decode)["fetched"] >= 2


def test_callers_of_a_killed_decode_server_are_told_and_its_prefill_server_goes_on(
    text_checkpoint: Path, launch: Launch, wait_for: Any
) -> None:
    asked = [body(number) for number in range(9)]
    with serving(text_checkpoint, "prefill") as prefill, ThreadPoolExecutor(8) as pool:
        command, url = serve_command(
            text_checkpoint,
            "methods.prefill_apart.role=decode",
            "methods.prefill_apart.tokens=64",
            f"methods.prefill_apart.servers=[{prefill.url}]",
        )
        with launch(1, command, MOE_LAUNCH_SECRET=SECRET) as decode:
            decode.wait_for("serving")
            ask = partial(httpx.post, f"{url}{URL}", timeout=60)
            assert ask(json=asked[0]).json()["usage"]["prompt_tokens_details"] == {
                "cached_tokens": 192
            }
            going = [pool.submit(ask, json=each) for each in asked[1:]]
            for each in going[:2]:
                each.result()
            decode.signal(0, signal.SIGSTOP)
            late = pool.submit(ask, json=asked[0])  # the system takes it, and nobody answers
            decode.signal(0, signal.SIGKILL)
            for each in (*going, late):
                assert isinstance(each.exception(), httpx.TransportError | None)
            assert isinstance(late.exception(), httpx.TransportError)
        wait_for(prefill.is_idle, "nothing is read for a server that is gone")
        with serving(text_checkpoint, "decode", servers=[prefill.url]) as other:
            assert answer(other, asked[-1])[1] == 192
            assert outcomes(other) == {"fetched": 1.0}


@contextmanager
def pretender(talk: Callable[[socket.socket], object]) -> Iterator[str]:
    """A prefill server that does something else."""
    with bind("127.0.0.1", 0) as listener:

        def run() -> None:
            with listener.accept()[0] as connection:
                talk(connection)

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n\r\n"


@pytest.mark.parametrize(
    "said",
    [b"", HEAD + b"\0\0", HEAD + b"\1" + b"x" * 500, HEAD + b"\1" + b"x" * 3_000_000, b"nonsense"],
    ids=["closes", "breaks off", "has another secret", "is too long", "no HTTP"],
)
def test_what_a_stranger_says_is_not_used(text_checkpoint: Path, said: bytes) -> None:
    def talk(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(said)

    with (
        pretender(talk) as url,
        serving(text_checkpoint, "decode", servers=[url]) as decode,
    ):
        assert answer(decode, body(1))[1] == 0
        assert "fetched" not in outcomes(decode)


def test_a_server_that_falls_silent_is_gone_after_the_timeout(text_checkpoint: Path) -> None:
    silent = threading.Event()
    with (
        pretender(lambda _: silent.wait(20)) as url,
        serving(text_checkpoint, "decode", servers=[url]) as decode,
    ):
        assert answer(decode, body(1))[1] == 0
        assert outcomes(decode) == {"failed": 1.0}
        silent.set()


@pytest.mark.parametrize(
    "piece", [b"\0", b"HTTP/1.1 100 Continue\r\n\r\n"], ids=["alive", "continue"]
)
def test_a_server_that_only_says_that_it_is_there_is_given_up(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    """Which needs no secret."""

    def talk(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(HEAD if piece == b"\0" else b"")
        with suppress(OSError):
            while not over.wait(0.02):
                connection.sendall(piece)

    over = threading.Event()
    monkeypatch.setattr(apart, "SLOWEST", 1e6)
    with (
        pretender(talk) as url,
        serving(text_checkpoint, "decode", servers=[url]) as decode,
    ):
        assert answer(decode, body(1))[1] == 0
        assert outcomes(decode) == {"failed": 1.0}
        over.set()


def _changed(block: StoredBlock, **other: Any) -> StoredBlock:
    layout = {layer: own._replace(**other) for layer, own in block.layout.items()}
    return block._replace(layout=layout)


LIES: dict[str, Callable[[StoredBlock, list[int]], Sequence[bytes | memoryview]]] = {
    "no numbers": lambda block, ids: encode_block(
        block._replace(rows=[torch.full_like(rows, 255) for rows in block.rows]), ids
    ),
    "other heads": lambda block, ids: encode_block(_changed(block, heads=5), ids),
    "other sizes": lambda block, ids: encode_block(_changed(block, key_size=2**40), ids),
    "a layer is missing": lambda block, ids: encode_block(
        StoredBlock(dict(list(block.layout.items())[1:]), block.rows[1:]), ids
    ),
    "short rows": lambda block, ids: encode_block(
        block._replace(rows=[rows[:-1] for rows in block.rows]), ids
    ),
    "other tokens": lambda block, ids: encode_block(block, ids[::-1]),
    "half a block": lambda block, ids: encode_block(block, ids)[:-1],
    "nothing": lambda block, ids: [],
}


def test_what_a_server_of_ours_says_wrongly_is_not_used(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows the secret and the model, and its blocks are signed."""
    with (
        serving(text_checkpoint, "prefill") as prefill,
        serving(text_checkpoint, "decode", servers=[prefill.url]) as decode,
    ):
        (role,) = decode.service.roles
        assert isinstance(role, apart.DecodeRole)
        for number, (lie, tell) in enumerate(LIES.items()):
            with monkeypatch.context() as patch:
                patch.setattr(apart, "encode_block", tell)
                found = answer(decode, body(number))
            assert found == (answer(prefill, body(number))[0], 0), lie
            assert outcomes(decode) == {"failed": number + 1.0}, lie
            assert caplog.messages[-1].endswith("; prompts are read here"), lie
            role._servers[0].rests_until = 0.0
        assert answer(decode, body(number + 1))[1] == 192
        assert decode.is_idle()


def test_other_secrets_and_other_models_are_refused(text_checkpoint: Path) -> None:
    with serving(text_checkpoint, "prefill") as prefill:
        assert prefill.http.post(apart.ROUTE, json={}).status_code == 401
        for other in ({"secret": "another"}, {"bits": 8}):
            with serving(text_checkpoint, "decode", servers=[prefill.url], **other) as decode:
                assert answer(decode, body(1))[1] == 0
                assert outcomes(decode) == {"failed": 1.0}
    with serving(text_checkpoint) as alone:
        assert alone.http.post(apart.ROUTE, json={}).status_code == 404


def test_prompts_with_images_and_with_logprobs_are_read_here() -> None:
    settings = {"role": "decode", "servers": ["http://127.0.0.1:1"]}
    profile = load_profile({"methods.prefill_apart": settings}, environ={}).profile
    role, asked = apart.DecodeRole(profile, SECRET), []

    async def fetch_one(group: object) -> None:
        asked.append(group)

    role._fetch_one = fetch_one  # type: ignore[method-assign]
    plain = SimpleNamespace(prompt_logprobs=None, rows=None)
    others = [
        SimpleNamespace(prompt_logprobs=0, rows=None),
        SimpleNamespace(prompt_logprobs=None, rows="of an image"),
    ]
    asyncio.run(role.before([*others, plain]))  # type: ignore[list-item]
    assert asked == [plain]


def test_an_expert_that_differs_is_another_model(tiny_checkpoint: Callable[[str], Path]) -> None:
    with MoE.from_pretrained(tiny_checkpoint("qwen3_moe")) as model:
        own = apart.fingerprint(model)
        experts = held_experts(model.experts.layers[-1])
        assert isinstance(experts, ExpertWeights)
        experts.down_EHF.data[0].mul_(1.001)
        assert apart.fingerprint(model) != own


def test_experts_on_disk_change_no_fingerprint(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    store = convert(tiny_checkpoint("qwen3_moe"), tmp_path / "store", ModelSettings(expert_bits=8))
    with MoE.from_pretrained(store, SMALL) as resident:
        own = apart.fingerprint(resident)
        profile = budget(store, resident, 0.5, offload=SMALL["offload"])
        with MoE.from_pretrained(store, profile) as offloaded:
            assert apart.fingerprint(offloaded) == own


def test_roles_need_each_other_a_cache_and_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = {"role": "decode", "servers": ["http://a:1"]}
    for settings, why in (
        ({"methods.prefill_apart.role": "decode"}, "prefill_apart.servers go together"),
        ({"methods.prefill_apart.servers": ["http://a:1"]}, "prefill_apart.servers go together"),
        ({"methods.prefill_apart": decode, "parallel.enabled": True}, "needs parallel.enabled"),
        ({"methods.prefill_apart": decode | {"servers": ["a:1"]}}, "must be like"),
        ({"parallel.role": "decode"}, "methods.prefill_apart.role"),
    ):
        with pytest.raises(ProfileError, match=why):
            load_profile(settings, environ={})
    monkeypatch.delitem(os.environ, "MOE_LAUNCH_SECRET", raising=False)
    for tokens, why in ((0, "needs memory.prefix_tokens"), (64, "set MOE_LAUNCH_SECRET to the")):
        given = {"methods.prefill_apart": decode, "memory.prefix_tokens": tokens}
        profile = load_profile(given, environ={}).profile
        (make,) = SERVER_ROLES.filled(profile)
        with pytest.raises(ProfileError, match=why):
            make(profile)
