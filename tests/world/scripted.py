"""A server whose model says what a script gives: everything else is the product's own.

A client needs a model that follows instructions to go through a round of a tool, and no such model
can be had here. So the tokens are scripted, and nothing beside them: requests come over HTTP, are
checked and translated; a real chat template renders the prompt, which a (tiny, random) model reads;
each sampled token is replaced by the script's next; parsers of calls and reasoning read the text,
and the dialect's events carry it. The script is given the prompt as text, so what a client has sent
and the template has lost is not answered.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe import MoE
from moe.sampling.batch import Token
from moe.sequence import Delta, RunningSequence
from moe.server import serve
from moe.server.listener import bind
from moe.settings.profile import load_profile

Script = Callable[[str], str]
"""Prompt -> what the model writes; the end of its turn is added."""


@dataclass
class Exchange:
    """One request and its answer, as they went over the wire.

    Attributes:
        status: of the answer; 0: none was sent.
        ignored: fields that the server has named in `x-moe-ignored`.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    answer: bytes = b""
    ignored: tuple[str, ...] = ()

    def told(self) -> dict[str, Any]:
        """For a report: bodies as they are read."""
        asked: Any = self.body.decode(errors="replace")
        with suppress(ValueError):
            asked = json.loads(self.body)
        return vars(self) | {"body": asked, "answer": self.answer.decode(errors="replace")}


@dataclass
class World:
    """A running server, its model's name and directory, and what clients have asked it."""

    url: str
    model: str
    directory: Path
    exchanges: list[Exchange] = field(default_factory=list)


@contextmanager
def scripted(codec: Any, script: Script) -> Iterator[None]:
    """Every sequence of this process writes what the script says to its prompt."""
    append = RunningSequence.append_token

    def append_token(sequence: RunningSequence, token: Token) -> Delta:
        said = sequence.__dict__.setdefault("scripted", None)
        if said is None:
            prompt = codec.tokenizer.decode(sequence.prompt_token_ids)
            said = codec.tokenizer.encode(script(prompt), add_special_tokens=False)
            sequence.__dict__["scripted"] = said = [*said, codec.tokenizer.eos_token_id]
        return append(sequence, Token(said[len(sequence.token_ids)]))

    with mock.patch.object(RunningSequence, "append_token", append_token):
        yield


def recording(app: ASGIApp, exchanges: list[Exchange]) -> ASGIApp:
    """The application, with a note of each exchange."""

    async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        exchange = Exchange(scope["method"], scope["path"], headers)
        exchanges.append(exchange)

        async def receive_it() -> Message:
            message = await receive()
            exchange.body += message.get("body", b"")
            return message

        async def send_it(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                names = dict(message["headers"]).get(b"x-moe-ignored", b"").decode()
                exchange.ignored = tuple(filter(None, names.split(", ")))
            exchange.answer += message.get("body", b"")
            await send(message)

        await app(scope, receive_it, send_it)

    return recorded


@contextmanager
def serving(directory: Path, script: Script | None) -> Iterator[World]:
    """Serves a model on a free port of 127.0.0.1 from a thread of this process.

    Args:
        directory: of the model; its name is the model's.
        script: what it says; None: what it says by itself.
    """
    model = MoE.from_pretrained(directory)
    listener = bind("127.0.0.1", 0)
    service = serve.Service(lambda _: model, (directory.name,), load_profile(environ={}), listener)
    world = World(service.address, directory.name, directory)
    create = serve.create_app

    def create_recorded(*given: Any) -> ASGIApp:
        return recording(create(*given), world.exchanges)

    ready = threading.Event()

    def run() -> None:
        try:
            asyncio.run(service.run(ready.set))
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    says = scripted(model.codec, script) if script else nullcontext()
    with mock.patch.object(serve, "create_app", create_recorded), says:
        thread.start()
        assert ready.wait(120)
        try:
            yield world
        finally:
            service.stop()
            thread.join(60)


def checkpoint(folder: Path, template: str, context: int) -> Path:
    """A tiny random model with the shipped model's tokenizer, another chat template and a context.

    Args:
        folder: where it is written; its name is the model's.
        template: Jinja source.
        context: tokens.
    """
    from transformers import AutoTokenizer

    from examples.models.tiny import tiny_config, tiny_model

    demo = Path(__file__).parents[2] / "examples" / "demo-model"
    tokenizer = AutoTokenizer.from_pretrained(demo)
    config = tiny_config("qwen3_moe")
    config.vocab_size = len(tokenizer)
    config.max_position_embeddings = context
    config.num_hidden_layers = 2
    config.eos_token_id = tokenizer.eos_token_id
    tiny_model("qwen3_moe", config=config).save_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.model_max_length = context
    tokenizer.save_pretrained(folder)
    return folder
