"""A tiny model with a tokenizer, and servers of it on ephemeral loopback ports."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from moe import MoE
from moe.engine.engine import Engine
from moe.sampling.batch import Token
from moe.sequence import Delta, RunningSequence
from moe.server.keys import make_keys
from moe.server.listener import bind
from moe.server.serve import Service
from moe.settings.profile import load_profile
from tests.moe.text.tool_calls.templates import HERMES

NAMES = ("tiny", "small/tiny")
UNKNOWN_FIELDS = {"unknown_fields": os.environ.get("UNKNOWN_FIELDS", "take")}
"""UNKNOWN_FIELDS=refuse: servers of tests that say nothing of it refuse them."""
TAKES = pytest.mark.skipif(UNKNOWN_FIELDS["unknown_fields"] == "refuse", reason="it is refused")
"""Marks tests of what is taken although nobody honours it."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('unknown role') }}"
    "{% endif %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class Running:
    """A server in a thread of this process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.url = service.address
        self.exit_code: int | BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def occupancy(self) -> dict[str, int]:
        assert self.service.queue is not None
        return self.service.queue.occupancy()

    def is_idle(self) -> bool:
        return not any(self.occupancy.values())

    def raw(self, body: dict[str, Any]) -> bytes:
        """A whole HTTP request for a completion."""
        request = httpx.Request("POST", f"{self.url}/v1/completions", json=body)
        lines = [f"{name}: {value}" for name, value in request.headers.items()]
        head = "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "", ""])
        return head.encode() + request.content

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(20)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(self.service.listener.getsockname())
        return connection

    @contextmanager
    def in_flight(self, body: dict[str, Any]) -> Iterator[socket.socket]:
        """A request for a completion that has been sent, on a connection of its own."""
        with self.connect() as connection:
            connection.sendall(self.raw(body))
            yield connection

    def stop(self) -> None:
        self.service.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.exit_code = asyncio.run(self.service.run(self._ready.set))
        except Exception as error:
            self.exit_code = error
        self._ready.set()


class Gate:
    """Holds the engine before its next step, once some may have gone by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.steps_before = 0
        step = Engine.step

        def gated(engine: Engine) -> Any:
            if self.steps_before:
                self.steps_before -= 1
            else:
                self.reached.set()
                assert self.open.wait(60)
            return step(engine)

        monkeypatch.setattr(Engine, "step", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


Serve = Callable[..., AbstractContextManager[Running]]


@pytest.fixture(scope="session")
def text_checkpoint(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny Qwen3-MoE with a tokenizer that has a token for each of 125 characters."""
    path = tmp_path_factory.mktemp("models") / NAMES[0]
    shutil.copytree(tiny_checkpoint("qwen3_moe"), path)
    letters = ["<pad>", "<s>", "</s>", "\n", *map(chr, range(32, 127)), *map(chr, range(224, 253))]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(text_checkpoint: Path) -> MoE:
    # What other tests have asked must not show in a test's usage.
    model = MoE.from_pretrained(text_checkpoint, memory={"prefix_tokens": 0})
    model.close = lambda: None  # type: ignore[method-assign]  # servers close it, one after another
    return model


@pytest.fixture(scope="session")
def serve(model: MoE) -> Serve:
    """Serves the model, or what `load` makes; keywords are keys of the section `server`."""

    @contextmanager
    def start(
        api_key: str | None = None,
        load: Callable[[], MoE] | None = None,
        port: int = 0,
        keys: Path | None = None,
        **limits: Any,
    ) -> Iterator[Running]:
        profile = load_profile({"server": UNKNOWN_FIELDS | limits}, environ={})
        listener = bind("127.0.0.1", port)
        running = Running(
            Service(
                lambda _: load() if load else model,
                NAMES,
                profile,
                listener,
                make_keys(api_key, str(keys) if keys else None),
            )
        )
        yield running
        running.stop()

    return start


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[Running]:
    """One for all tests that leave it as it is."""
    with serve() as running:
        yield running


@pytest.fixture(scope="session")
def strict(serve: Serve) -> Iterator[Running]:
    """The same with ``server.unknown_fields: refuse``."""
    with serve(unknown_fields="refuse") as running:
        yield running


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


Say = Callable[..., None]


def forget_habits(model: MoE) -> None:
    """What was found out by probing another chat template."""
    for derived in ("tools", "call_tokens", "reasoning", "reasoning_tokens"):
        model.codec.__dict__.pop(derived, None)


@pytest.fixture
def say(model: MoE, monkeypatch: pytest.MonkeyPatch) -> Iterator[Say]:
    """Gives the model a template with tools, and makes it answer with these texts, by sample."""
    texts: list[str] = []

    def append_token(sequence: RunningSequence, token: Token) -> Delta:
        assert model.codec.tokenizer is not None
        text = texts[sequence.sampler.index]
        ids = [*model.codec.tokenizer.encode(text), model.codec.tokenizer.eos_token_id]
        return append(sequence, Token(ids[len(sequence.token_ids)]))

    def tell(*answers: str, template: str = HERMES) -> None:
        texts[:] = answers
        assert model.codec.tokenizer is not None
        monkeypatch.setattr(model.codec.tokenizer, "chat_template", template)
        forget_habits(model)

    append = RunningSequence.append_token
    monkeypatch.setattr(RunningSequence, "append_token", append_token)
    # The vocabulary has a token for each character, and templates are long.
    monkeypatch.setattr(model, "_loaded", replace(model._loaded, context_length=4096))
    yield tell
    forget_habits(model)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a certificate for 127.0.0.1 that nobody has vouched for, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key, made = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(made)),
        ],
        check=True,
        capture_output=True,
    )
    made.write_text(made.read_text() + key.read_text())
    return made
