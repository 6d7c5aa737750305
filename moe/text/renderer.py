"""Runs chat templates in processes of their own, with limits; as a program, is such a process.

A chat template comes with a model, and jinja2's sandbox limits what it may touch, not what it
costs: ``'a' * 3000000000`` is one operation that no tracing interrupts. `RENDERERS` keeps a few
processes, each with less time and memory than the server has and without its environment. They
call transformers' own `apply_chat_template`, so that texts are the same as there.

This module imports no other module of ours, so that the process starts fast.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_SECONDS = 5
WALL_SECONDS = 30.0  # for a busy machine
MEMORY = 2**30
TEXT_CHARACTERS = 2**26
_PASSED_ON = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ")
_IDLE_KEPT = 2  # 60 MB each
_CHUNK = 2**20


class TemplateLimitError(Exception):
    """A template needs more than it is given; the message says of what."""


class TemplateSyntaxFault(ValueError):
    """A template cannot be read, whatever the messages; the message says the line and why."""


class Renderers:
    """Processes that render chat templates, started on demand; threads may share one object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        atexit.register(self.close)

    def render(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """What ``tokenizer.apply_chat_template(messages, tokenize=False, **options)`` returns.

        Raises:
            TemplateLimitError: it takes more than its time, memory or length.
            TemplateSyntaxFault: it cannot be read.
            ValueError: the template refused the messages; the message is the template's own.
        """
        asked = {
            "template": tokenizer.chat_template,
            "special": tokenizer.special_tokens_map,
            "messages": messages,
            "options": dict(options),
            "seconds": CPU_SECONDS,
        }
        request = json.dumps(asked, default=_plain).encode() + b"\n"
        process = self._take()
        try:
            answer = json.loads(process.ask(request))
        except BaseException:
            process.end()
            raise
        if "limit" in answer:
            process.end()  # its memory may not be what it was
            raise TemplateLimitError(answer["limit"])
        self._give_back(process)
        if "syntax" in answer:
            raise TemplateSyntaxFault(answer["syntax"])
        if "fault" in answer:
            raise ValueError(answer["fault"])
        return str(answer["text"])

    def start(self) -> None:
        """Start a process if none is idle; returns before it is ready, which takes a second."""
        self._give_back(self._take())

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        return _Process()

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_KEPT:
                self._idle.append(process)
                return
        process.end()


RENDERERS = Renderers()


class _Process:
    """One process: a line of JSON in, a line of JSON out."""

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal is not for it
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> bytes:
        """The answer to a request. Raises `TemplateLimitError`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        end = time.monotonic() + WALL_SECONDS
        # The process reads all of a request before it does anything, so this does not wait for it.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request)
            self._process.stdin.flush()
        output, answer = self._process.stdout.fileno(), bytearray()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while not answer.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TemplateLimitError(f"takes more than {WALL_SECONDS:g} s")
            part = os.read(output, _CHUNK)
            if not part:
                raise TemplateLimitError(self._why_it_died())
            answer += part
            if len(answer) > 12 * TEXT_CHARACTERS + _CHUNK:  # of JSON, if each is a surrogate pair
                raise TemplateLimitError(_TOO_LONG)
        return bytes(answer)

    def _why_it_died(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return _TOO_SLOW
        return f"ended the process that runs it (exit code {code})"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not flushed
                    stream.close()


_TOO_SLOW = "takes too long"
_TOO_MUCH = f"takes more than {MEMORY >> 20} MiB of memory"
_TOO_LONG = f"writes more than {TEXT_CHARACTERS} characters"


def _plain(value: Any) -> Any:
    """What a template sees of an object that is no JSON; numbers of numpy are numbers."""
    item = getattr(value, "item", None)
    return item() if callable(item) else f"<{type(value).__name__}>"


def main() -> None:
    """Answer requests from stdin on stdout until it is closed."""
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    stand_in = _stand_in()
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(_answer(stand_in, line)) + "\n")
        sys.stdout.flush()


def _answer(stand_in: Any, line: bytes) -> dict[str, str]:
    try:
        asked = json.loads(line)
        # In whole seconds, of all that the process has done.
        most = math.ceil(time.process_time()) + asked["seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        text = stand_in(asked["template"], asked["special"]).apply_chat_template(
            asked["messages"], tokenize=False, **asked["options"]
        )
        return {"text": text} if len(text) <= TEXT_CHARACTERS else {"limit": _TOO_LONG}
    except MemoryError:
        return {"limit": _TOO_MUCH}
    except Exception as error:  # a template may fail in any way a program can
        message = f"{error!s:.300}" or type(error).__name__
        if type(error).__name__ == "TemplateSyntaxError":  # jinja2's, which transformers imports
            return {"syntax": f"line {error.lineno}: {message}"}  # type: ignore[attr-defined]
        return {"fault": message}


def _stand_in() -> type:
    """A tokenizer's class that has a template and special tokens, and cannot do anything else."""
    sys.path.pop(0)  # this folder, whose modules have common names
    _skip_models()
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    class StandIn(PreTrainedTokenizerBase):
        special_tokens_map = property(lambda self: self.__dict__["special"])

        def __init__(self, template: Any, special: dict[str, Any]) -> None:
            self.__dict__ |= {"chat_template": template, "special": special}

    return StandIn


def _skip_models() -> None:
    """Let transformers' modules be imported without torch and without its list of all models, which
    take most of the time."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    package = types.ModuleType("transformers")
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__spec__ = spec
    package.__version__ = importlib.metadata.version("transformers")  # type: ignore[attr-defined]
    sys.modules["transformers"] = package


if __name__ == "__main__":
    main()
