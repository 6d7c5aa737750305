"""``moe chat`` with a model that thinks aloud."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moe.commands import chat
from moe.errors import ContextError, RequestError
from moe.text.tokenizer import TextCodec
from tests.moe.text.test_prompts import VOCAB_SIZE, make_tokenizer
from tests.moe.text.tool_calls.reasoning_templates import QWEN3, QWEN3_OPENED
from tests.moe.text.tool_calls.templates import HERMES

QUESTION: dict[str, object] = {"role": "user", "content": "Rain?"}


@pytest.mark.parametrize(
    ("template", "text", "plain", "dimmed"),
    [
        (QWEN3, "<think>\nHm.\n</think>\n\nYes.", "Hm.\n\nYes.\n", "\x1b[2mHm.\x1b[0m\n\nYes.\n"),
        (QWEN3_OPENED, "Hm.</think>Yes.", "Hm.\n\nYes.\n", "\x1b[2mHm.\x1b[0m\n\nYes.\n"),
        (QWEN3, "Yes.", "Yes.\n", "Yes.\n"),
        (HERMES, "Yes.", "Yes.\n", "Yes.\n"),
        (HERMES, "\x1b[2J\tY\r\x9b!\a", "\x1b[2J\tY\r\x9b!\a\n", "\\x1b[2J\tY\\r\\x9b!\\x07\n"),
        (
            QWEN3,
            "<think>\x1b]0;a\a</think>Y",
            "\x1b]0;a\a\n\nY\n",
            "\x1b[2m\\x1b]0;a\\x07\x1b[0m\n\nY\n",
        ),
    ],
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_thoughts_are_dimmed_and_kept_apart(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    template: str,
    text: str,
    plain: str,
    dimmed: str,
    is_terminal: bool,
) -> None:
    def run(_: object, messages: Any, write: Callable[[str], None], shown: Any) -> Any:
        assert messages == [QUESTION]
        assert not shown
        for piece in (text[:10], text[10:]):
            write(piece)
        return None, "stats"

    monkeypatch.setattr(chat, "run", run)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    model: Any = SimpleNamespace(codec=TextCodec(make_tokenizer(template), VOCAB_SIZE))
    history: list[dict[str, object]] = []
    assert chat._answer(model, history, QUESTION) == "stats"
    assert capsys.readouterr().out.replace("\x1b[0m\x1b[2m", "") == (
        dimmed if is_terminal else plain
    )
    thought, _, said = plain.removesuffix("\n").rpartition("\n\n")
    kept = {"reasoning_content": thought} if thought else {}
    assert history == [QUESTION, {"role": "assistant", "content": said, **kept}]


@pytest.mark.parametrize("turns", [0, 1])
def test_a_conversation_that_has_become_too_long_can_be_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], turns: int
) -> None:
    """A first question that is too long only can be shortened."""

    def run(*_: object, **__: object) -> Any:
        raise ContextError("too long")

    monkeypatch.setattr(chat, "run", run)
    model: Any = SimpleNamespace(codec=TextCodec(make_tokenizer(HERMES), VOCAB_SIZE))
    turn: list[dict[str, object]] = [{**QUESTION}, {"role": "assistant", "content": "No."}]
    history = turn * turns
    before = [*history]
    assert chat._answer(model, history, QUESTION) is None
    assert history == before
    way_out = "; /reset forgets the conversation" if turns else ""
    assert capsys.readouterr().err == f"moe: too long{way_out}\n"


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_model_that_cannot_chat_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, has_tokenizer: bool
) -> None:
    codec = TextCodec(make_tokenizer(None) if has_tokenizer else None, VOCAB_SIZE)
    monkeypatch.setattr(chat, "load", lambda *_: SimpleNamespace(codec=codec))
    monkeypatch.setattr(chat, "_ask", lambda: pytest.fail("asked"))
    with pytest.raises(RequestError, match=r"need a (chat template|tokenizer)"):
        chat.chat("some", Any)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_ctrl_c_at_the_prompt_discards_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: is_terminal))
    if not is_terminal:
        with pytest.raises(KeyboardInterrupt):
            chat._ask()
        return
    assert chat._ask() == ""
    assert "/exit ends" in capsys.readouterr().out


def test_pasted_lines_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """As readline does where a terminal marks what is pasted."""
    readline, said = pytest.importorskip("readline"), list[str]()
    monkeypatch.setattr(readline, "parse_and_bind", said.append)
    chat.edit_lines()
    assert said == ["set enable-bracketed-paste on"]
