"""``moe chat``: a conversation in a terminal. The model's reasoning is shown dimmed."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from moe.commands.terminal import RunStats, load, run, write_out
from moe.errors import ContextError, RequestError
from moe.model import MoE
from moe.settings.profile import LoadedProfile
from moe.text.chat import REASONING_KEY
from moe.text.tool_calls.reasoning import ReasoningParser

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def chat(name: str | Path, profile: LoadedProfile, system: str | None = None) -> int:
    """Chat until end of input or ``/exit``, with ``system`` as the system message.

    Raises:
        RequestError: the model has no tokenizer or no chat template, or the template refuses the
            system message.
    """
    model = load(name, profile)
    leading: list[dict[str, object]] = []
    if system is not None:
        leading = [{"role": "system", "content": system}]
    greeting: dict[str, object] = {"role": "user", "content": "Hello."}
    model.codec.encode([*leading, greeting])  # refuse now, not at each turn
    history = [*leading]
    stats: RunStats | None = None
    if sys.stdin.isatty():
        with suppress(ImportError):  # not every Python is built with it
            import readline  # noqa: F401 - arrow keys and history for `input`
        print("Ctrl-D or /exit ends, /reset forgets the conversation, /stats shows figures.")
    while (line := _ask()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            history[:] = leading
            print("(conversation forgotten)")
        elif line == "/stats":
            print(stats.summary() if stats else "(nothing generated yet)")
        elif line:
            stats = _answer(model, history, line) or stats
    return 0


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
            write_out(f"{_DIM}{thought}{_PLAIN}" if sys.stdout.isatty() else thought)
        if said:
            write_out("\n\n" + said if self.thought and not self.said else said)
        self.thought += thought
        self.said += said


def _answer(model: MoE, history: list[dict[str, object]], line: str) -> RunStats | None:
    """One turn, added to the history unless it is refused or interrupted."""
    question: dict[str, object] = {"role": "user", "content": line}
    messages = [*history, question]
    try:
        answer = _AnswerPrinter(model, messages)
        tokens = model.codec.reasoning_tokens.values()
        _, stats = run(model, messages, answer.write, shown=tokens)
    except RequestError as error:
        full = isinstance(error, ContextError) and len(history) > 1
        way_out = "; /reset forgets the conversation" if full else ""
        print(f"moe: {error}{way_out}", file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print("\n(interrupted; this turn is forgotten)")
        return None
    answer.finish()
    thought = {REASONING_KEY: answer.thought} if answer.thought else {}
    history += [question, {"role": "assistant", "content": answer.said, **thought}]
    return stats


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
