"""``moe chat``: a conversation in a terminal. The model's reasoning is shown dimmed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moe.commands.printable import printable
from moe.commands.terminal import RunStats, load, run, write_out
from moe.errors import BusyError, ContextError, RequestError
from moe.model import MoE
from moe.settings.profile import LoadedProfile
from moe.text.chat import REASONING_KEY
from moe.text.tool_calls.reasoning import ReasoningParser


def chat(
    name: str | Path,
    profile: LoadedProfile,
    system: str | None = None,
    images: Sequence[str] = (),
) -> int:
    """Chat until end of input or ``/exit``.

    Args:
        system: the system message.
        images: files of images that the first message shows.

    Raises:
        RequestError: the model has no tokenizer or no chat template, the template refuses the
            system message, or an image cannot be read.
    """
    shown = [_image(file) for file in images]
    model = load(name, profile)
    leading: list[dict[str, object]] = []
    if system is not None:
        leading = [{"role": "system", "content": system}]
    greeting = _question("Hello.", shown)
    model.codec.encode([*leading, greeting])  # refuse now, not at each turn
    history = [*leading]
    stats: RunStats | None = None
    if sys.stdin.isatty():
        edit_lines()
        print(
            "Ctrl-D or /exit ends, /reset forgets the conversation, /stats shows figures, "
            "/image FILE shows an image with the next message."
        )
    while (line := _ask()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            history[:] = leading
            print("(conversation forgotten)")
        elif line == "/stats":
            print(stats.summary() if stats else "(nothing generated yet)")
        elif line.startswith("/image "):
            try:
                shown.append(_image(line.removeprefix("/image ").strip()))
                model.codec.encode([*leading, _question("Hello.", shown)])
            except (RequestError, BusyError) as error:
                shown.clear()
                print(f"moe: {printable(str(error))}", file=sys.stderr)
        elif line:
            stats = _answer(model, history, _question(line, shown)) or stats
            shown.clear()
    return 0


def _image(file: str) -> bytes:
    """The bytes of an image's file. Raises `RequestError`."""
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read the image {file}: {error.strerror or error}") from error


def _question(text: str, images: Sequence[bytes]) -> dict[str, object]:
    """A message of the user."""
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, object]] = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class _AnswerPrinter:
    """Prints an answer while it is generated.

    Attributes:
        thought: its reasoning so far.
        said: the text after the reasoning so far.
    """

    def __init__(self, model: MoE, messages: list[dict[str, object]]) -> None:
        format = model.codec.reasoning.format
        self._parser = None
        if format is not None:
            inside = model.codec.opens_reasoning(model.codec.encode(messages))
            self._parser = ReasoningParser(format, inside=inside)
        self.thought = self.said = ""

    def write(self, text: str) -> None:
        self._write(*(("", text) if self._parser is None else self._parser.push(text)))

    def finish(self) -> None:
        if self._parser is not None:
            self._write(*self._parser.finish())
        write_out("\n")

    def _write(self, thought: str, said: str) -> None:
        if thought:
            write_out(thought, dimmed=True)
        if said:
            write_out("\n\n" + said if self.thought and not self.said else said)
        self.thought += thought
        self.said += said


def _answer(
    model: MoE, history: list[dict[str, object]], question: dict[str, object]
) -> RunStats | None:
    """One turn, added to the history unless it is refused or interrupted."""
    messages = [*history, question]
    try:
        answer = _AnswerPrinter(model, messages)
        tokens = model.codec.reasoning_tokens.values()
        _, stats = run(model, messages, answer.write, shown=tokens)
    except (RequestError, BusyError) as error:
        full = isinstance(error, ContextError) and len(history) > 1
        way_out = "; /reset forgets the conversation" if full else ""
        print(f"moe: {printable(str(error))}{way_out}", file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print("\n(interrupted; this turn is forgotten)")
        return None
    answer.finish()
    thought = {REASONING_KEY: answer.thought} if answer.thought else {}
    history += [question, {"role": "assistant", "content": answer.said, **thought}]
    return stats


def edit_lines() -> None:
    """Give `input` arrow keys and history, and make pasted lines one message."""
    with suppress(ImportError):  # not every Python is built with it
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def _ask() -> str | None:
    """The next message; None at the end of input. Ctrl-C on a terminal discards the line."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print("\n(Ctrl-D or /exit ends)")
        return ""
