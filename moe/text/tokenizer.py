"""`TextCodec`: prompts to token ids and back, for one model.

A model without a usable tokenizer still runs on token ids; requests that need text are then refused
with the reason. Code in a model's directory is never run: a tokenizer that needs it is unusable.
"""

from __future__ import annotations

import base64
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from experts.files import read_small
from moe.errors import CheckpointError, ContextError, RequestError
from moe.fair_pool import without_interpreter
from moe.network.prompt_rows import PromptRows
from moe.sampling.params import ThinkingBudget
from moe.text.chat import (
    REASONING_KEY,
    RENDERERS,
    check_settings,
    render,
    take_images,
    with_calls,
    with_reasoning,
)
from moe.text.control_tokens import ControlTokens, Masks, Ranges
from moe.text.conversation import render_whole
from moe.text.detokenize import (
    IncrementalDecoder,
    decode_beside,
    special_token_ids,
    without_panics,
)
from moe.text.generation_config import GENERATION_CONFIG, read_generation_config
from moe.text.tool_calls.probe import ToolSupport, probe_tools
from moe.text.tool_calls.read_back import Render
from moe.text.tool_calls.reasoning import ReasoningSupport, probe_reasoning
from moe.text.tool_calls.response_template import ResponseTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""Text, token ids, or chat messages with `role` and `content`: text, or a list of parts ``{"type":
"text", "text": ...}``, ``{"type": "image", "image": ...}`` (the bytes of a PNG, JPEG or WebP file)
and ``{"type": "image_url", "image_url": {"url": ...}}`` (a data URL)."""

OPENED: Mapping[str, bool] = {"add_generation_prompt": True}
"""The default `ending` of a chat's prompt: it opens the assistant's turn."""
_BEHIND = 16  # a prompt may have this many tokens of space after the tag that opens reasoning
ToolSpec = Mapping[str, object]
"""A tool as OpenAI's API describes it: ``{"type": "function", "function": {...}}``."""
_TEXTS = {".json", ".jinja", ".model", ".tiktoken", ".txt"}
_PATTERNS = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
PROCESSOR_TEMPLATE = "chat_template.json"
_FILE_BYTES = 1 << 28  # of any file of a tokenizer; the largest known have 35 MB
_TOKEN_CHARACTERS = 1 << 16  # of the text of a token
_HEAD = 4  # characters for each allowed token of the beginning that a very long text is judged by
_SHORT = 4096  # ids whose text is made in a few milliseconds
_TEXT_CHARACTERS = 1 << 25  # of a prompt, after a tokenizer's own replacements
WHY_NONE = "no_tokenizer.txt"
"""A file that says why a directory has no tokenizer, where what made the directory knows."""


class ImagePrompt(list[int]):
    """Token ids of a prompt with images, and what the text model is given for them.

    Attributes:
        rows: for each token.
    """

    def __init__(self, token_ids: Iterable[int], rows: PromptRows) -> None:
        super().__init__(token_ids)
        self.rows = rows


class ReadsImages(Protocol):
    """The part of a multimodal model that turns images into rows for its text model."""

    def read(self, text: str, images: Sequence[object]) -> ImagePrompt:
        """A rendered conversation with its images, in order. Raises `RequestError`."""
        ...


class TextCodec:
    """A model's tokenizer, with every input checked against the model's vocabulary.

    The formats of tool calls and reasoning are found by probing the chat template on first use.

    Attributes:
        tokenizer: transformers' tokenizer; None where the model has no usable one.
        no_tokenizer_reason: why there is none, else "".
        vocab_size: number of ids that the model's embedding knows.
        eos_token_ids: ids that end a text by the model's own rules.
        images: what reads images; or why nothing does.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        no_tokenizer_reason: str = "the model has no tokenizer",
        images: ReadsImages | str = "this model reads text only",
    ) -> None:
        self.images = images
        self.tokenizer = tokenizer
        self.no_tokenizer_reason = "" if tokenizer is not None else no_tokenizer_reason
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)

    @classmethod
    def from_directory(cls, directory: Path, config: PreTrainedConfig) -> TextCodec:
        """Load the tokenizer and the end tokens of the model in a local directory.

        End tokens are the union of what generation_config.json, the model's configuration and the
        tokenizer say. Raises `CheckpointError` where generation_config.json is damaged.
        """
        tokenizer, reason = load_tokenizer(directory)
        eos = eos_token_ids(directory, config, tokenizer)
        return cls(tokenizer, config.get_text_config().vocab_size, eos, reason)

    def warm_up(self) -> None:
        """Start what renders chats, so that the first one does not wait a second for it."""
        if self.tokenizer is not None and self.tokenizer.chat_template:
            RENDERERS.start()

    def encode(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        tools: Sequence[ToolSpec] | None = None,
        settings: Mapping[str, object] | None = None,
        ending: Mapping[str, bool] = OPENED,
    ) -> list[int]:
        """Token ids of a prompt, at least one.

        Text gets the tokenizer's own special tokens; chat messages are rendered by the model's chat
        template.

        Args:
            max_tokens: text that must have more tokens is refused before it is tokenized.
            tools: tools that the chat template shows to the model.
            settings: further variables for the chat template.
            ending: whether the template opens the assistant's turn or continues the last message.

        Raises:
            RequestError: the prompt is not valid, or the model cannot take it.
        """
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise RequestError(
                "a prompt must be a string, a list of token ids or a list of chat messages, "
                f"got {type(prompt).__name__}"
            )
        if isinstance(prompt, ImagePrompt):
            return prompt
        if len(prompt) == 0:
            raise RequestError("the prompt is empty; give at least one character, id or message")
        if isinstance(prompt, str):
            token_ids = self._encode_text(prompt, max_tokens)
        elif is_chat(prompt):
            messages, images = take_images(prompt)
            if images and isinstance(self.images, str):
                raise RequestError(f"the messages have images, and {self.images}")
            text, spelled = self._chat_text(messages, settings or {}, tools, ending)
            if images:
                assert not isinstance(self.images, str)
                self._check_text(text, max_tokens)
                with without_interpreter():
                    read = self.images.read(text, images)
                return ImagePrompt(self._checked(read), read.rows)
            token_ids = self._encode_text(text, max_tokens, special=False)
            if spelled:
                token_ids = self._control_tokens.encode(text, token_ids, spelled)
        else:
            token_ids = prompt  # type: ignore[assignment]
        return self._checked(token_ids)

    def with_images(self, images: ReadsImages | str) -> TextCodec:
        """The same with what reads images, or why nothing does."""
        return TextCodec(
            self.tokenizer, self.vocab_size, self.eos_token_ids, self.no_tokenizer_reason, images
        )

    def require_tokenizer(self, need: str) -> PreTrainedTokenizerBase:
        """The tokenizer; raises `RequestError` saying that `need` is impossible without one."""
        if self.tokenizer is None:
            raise RequestError(
                f"{need} need a tokenizer, and {self.no_tokenizer_reason}; use token ids"
            )
        return self.tokenizer

    def special_tokens(self, stop: Collection[str]) -> dict[int, str]:
        """Ids and texts of the special tokens that are stop strings.

        Raises `RequestError` without tokenizer.
        """
        self.require_tokenizer("stop strings")
        return {i: text for i, text in self._special_texts().items() if text in stop}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included. Raises `RequestError` without tokenizer."""
        tokenizer = self.require_tokenizer("texts of token ids")
        ids, fast = list(token_ids), getattr(tokenizer, "backend_tokenizer", None)
        decode: Callable[[], object] = partial(
            tokenizer.decode, ids, clean_up_tokenization_spaces=False
        )
        if fast is not None and len(ids) > _SHORT:
            decode = partial(decode_beside, fast, ids)
        return str(without_panics(decode, "write these tokens as text"))

    @cached_property
    def tools(self) -> ToolSupport:
        """Tool support of the model, and the format of its calls."""
        template = self._template()
        if isinstance(template, str):
            return ToolSupport(None, template)
        texts = self._special_texts()
        return probe_tools(
            template,
            list(texts.values()),
            [text for i, text in texts.items() if i in self.eos_token_ids],
        )

    @cached_property
    def reasoning(self) -> ReasoningSupport:
        """The format of the model's reasoning, or why it is not known."""
        template = self._template()
        if isinstance(template, str):
            return ReasoningSupport(None, template)
        return probe_reasoning(template)

    def template_mentions(self, name: str) -> bool:
        """Return whether the chat template may read a variable: its source has the name, or is
        unknown."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        return (
            not isinstance(template, str)
            or re.search(rf"\b{re.escape(name)}\b", template) is not None
        )

    @cached_property
    def call_tokens(self) -> dict[str, int]:
        """Texts and ids of the special tokens with which the model writes calls."""
        return {} if self.tools.format is None else self._written(self.tools.format.literals)

    @cached_property
    def reasoning_tokens(self) -> dict[str, int]:
        """Texts and ids of the special tokens around reasoning."""
        format = self.reasoning.format
        return {} if format is None else self._written(format.literals)

    @cached_property
    def response_template(self) -> ResponseTemplate | str:
        """The tokenizer's own rules for reading answers, or why it has none."""
        if self.tokenizer is None:
            return self.no_tokenizer_reason
        return ResponseTemplate.of(self.tokenizer)

    @cached_property
    def template_tokens(self) -> frozenset[int]:
        """Ids of the special tokens, but end tokens, that the response template looks for."""
        template, ends = self.response_template, self.eos_token_ids
        if isinstance(template, str):
            return frozenset()
        texts = self._special_texts().items()
        return frozenset(i for i, text in texts if i not in ends and template.mentions(text))

    def opens_reasoning(self, token_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends inside reasoning, so that its answer continues the
        reasoning."""
        format = self.reasoning.format
        return format is not None and format.opened_by(
            self.decode(token_ids[-len(format.open) - _BEHIND :])
        )

    def closes_reasoning(self, token_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends behind reasoning, as templates write it to turn reasoning
        off."""
        format = self.reasoning.format
        return format is not None and format.closed_by(
            self.decode(token_ids[-len(format.close) - _BEHIND :])
        )

    def thinking_budget(
        self, tokens: int, prompt: Sequence[int], *, calls: bool = False
    ) -> ThinkingBudget | None:
        """A limit on the reasoning in answers to a prompt; None: the model's is not known.

        Args:
            calls: the answer may call tools. On channels a call is a message behind the reasoning,
                so that only the message of the reasoning is ended, and not the next one begun.
        """
        format = self.reasoning.format
        if format is None or self.closes_reasoning(prompt):
            return None
        close, open_ = format.close, format.open
        channels = bool(format.lead) and close.endswith(format.lead)
        if channels and calls:
            close = close.removesuffix(format.lead)
        tokenizer = self.require_tokenizer("limits of reasoning")
        ids = tuple(tokenizer.encode(close, add_special_tokens=False))
        inside = self.opens_reasoning(prompt)
        return ThinkingBudget(tokens, open_, close, ids, inside, reopens=channels and calls)

    def decoder(
        self, shown: Collection[int] = (), behind: Sequence[int] = ()
    ) -> IncrementalDecoder | None:
        """A new decoder for one sequence; None without a tokenizer. See `IncrementalDecoder`."""
        return None if self.tokenizer is None else IncrementalDecoder(self.tokenizer, shown, behind)

    def _template(self) -> Render | str:
        """The function that renders the chat template, or why there is none."""
        if self.tokenizer is None:
            return self.no_tokenizer_reason
        if not self.tokenizer.chat_template:
            return "the model's tokenizer has no chat template"
        return partial(render, self.tokenizer)

    def _written(self, literals: Iterable[str]) -> dict[str, int]:
        """The special tokens in some literals, without end tokens: their texts and ids."""
        written, ends = "\0".join(literals), self.eos_token_ids
        special = self._special_texts().items()
        return {text: i for i, text in special if text in written and i not in ends}

    def _special_texts(self) -> dict[int, str]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return {}
        ids = sorted(special_token_ids(tokenizer) | self.eos_token_ids)
        texts = {i: str(tokenizer.convert_ids_to_tokens(i) or "") for i in ids}
        return {i: text for i, text in texts.items() if text}

    def _encode_text(self, text: str, max_tokens: int | None, *, special: bool = True) -> list[int]:
        """Token ids of text; `special`: with the tokenizer's own special tokens."""
        tokenizer = self.require_tokenizer("text prompts")
        self._check_text(text, max_tokens)

        def encode(text: str) -> list[int]:
            work = partial(tokenizer.encode, text, add_special_tokens=special, verbose=False)
            with without_interpreter():
                return list(without_panics(work, "take this text"))

        if max_tokens is not None and len(text) > 2 * _HEAD * max_tokens:
            # A text that is far too long is not tokenized to its end. What follows may change the
            # last tokens of the head, and a few tokens more than allowed are no proof.
            head = len(encode(text[: _HEAD * max_tokens]))
            if head > max_tokens + max_tokens // 4 + 64:
                raise ContextError(
                    f"the prompt has {len(text)} characters, the first {_HEAD * max_tokens} of "
                    f"which are {head} tokens, and at most {max_tokens} are allowed; shorten it",
                    *(max_tokens, head),
                )
        return encode(text)

    def _chat_text(
        self,
        messages: Sequence[Any],
        settings: Mapping[str, object],
        tools: Sequence[ToolSpec] | None,
        ending: Mapping[str, bool],
    ) -> tuple[str, Ranges]:
        """A rendered conversation, and where clients' texts in it spell control tokens."""
        tokenizer = self.require_tokenizer("chat prompts")
        if not tokenizer.chat_template:
            raise RequestError(
                "chat prompts need a chat template, and the model's tokenizer has none; "
                "give the prompt as text"
            )
        if settings:
            check_settings(tokenizer, settings)
        plain = [dict(message) for message in messages]
        if any(message.get("tool_calls") for message in plain):
            plain = with_calls(plain, self.tools.format)
        if any(message.get(REASONING_KEY) for message in plain):
            format = self.reasoning.format
            plain = with_reasoning(plain, None if format is None else format.key)
        source = str(tokenizer.chat_template)
        options = {**ending, **settings}

        def write(messages: list[dict[str, Any]], tools: Any) -> str:
            return render_whole(
                partial(render, tokenizer), messages, source, tools=tools, **options
            )

        masks = Masks()
        hidden = [masks.hide(each, self._spelling(each.get("role"))) for each in plain]
        hidden_tools = masks.hide(tools, self._spelling("tool"))
        if masks:
            found = masks.show(write(hidden, hidden_tools))
            if found is not None:
                return found
        return write(plain, tools), ()

    def _check_text(self, text: str, max_tokens: int | None) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"a prompt's text must be valid Unicode, got the lone surrogate "
                f"{text[error.start]!r} at position {error.start}; remove it"
            ) from error
        if max_tokens is not None and len(text) > max_tokens * self._longest_token:
            raise ContextError(
                f"the prompt has {len(text)} characters, more than {max_tokens} tokens can have "
                f"({self._longest_token} each at most); shorten it",
                *(max_tokens, max(max_tokens + 1, len(text) // self._longest_token)),
            )

        if len(text) * self._growth > _TEXT_CHARACTERS:
            raise ContextError(
                f"the prompt has {len(text)} characters, and the model's tokenizer may make "
                f"{self._growth} of each; send at most {_TEXT_CHARACTERS // self._growth}"
            )

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.require_tokenizer("chat prompts"), self.eos_token_ids)

    def _spelling(self, role: object) -> re.Pattern[str] | None:
        """Finds control tokens in a message. An answer may have its reasoning in its text, which
        templates look for."""
        return self._answers_spelling if role == "assistant" else self._control_tokens.spelling

    @cached_property
    def _answers_spelling(self) -> re.Pattern[str] | None:
        return self._control_tokens.spelling_but(self.reasoning_tokens.values())

    @cached_property
    def _growth(self) -> int:
        """The most characters or tokens that the tokenizer's rules may make of a character."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return (
            math.ceil(_growth(backend.normalizer) * _growth(backend.post_processor))
            if backend
            else 1
        )

    @cached_property
    def _longest_token(self) -> int:
        """Length of the longest token, in characters."""
        return max(map(len, self.require_tokenizer("text prompts").get_vocab()))

    def _checked(self, token_ids: Iterable[Any]) -> list[int]:
        ids = list(token_ids)
        # The usual case without a loop in Python: prompts are long, and a GPU waits for them.
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size:
            return ids
        checked: list[int] = []
        for position, token_id in enumerate(ids):
            number = _index(token_id)
            if number is None or not 0 <= number < self.vocab_size:
                raise RequestError(
                    f"token ids must be whole numbers from 0 to {self.vocab_size - 1} (vocabulary "
                    f"of {self.vocab_size}), got {token_id!r:.80} at position {position}"
                )
            checked.append(number)
        if not checked:
            raise RequestError("the prompt has no tokens; give text that the tokenizer knows")
        return checked


def is_chat(prompt: Prompt) -> bool:
    """Return whether a prompt is a conversation."""
    return any(issubclass(kind, Mapping) for kind in set(map(type, prompt)))


def _index(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def load_tokenizer(directory: Path) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The tokenizer in a local directory and "", or None and why it cannot be used."""
    from transformers import AutoTokenizer

    # transformers makes an empty tokenizer of some architectures where the files are absent.
    if not any(any(directory.glob(pattern)) for pattern in _PATTERNS):
        told = directory / WHY_NONE
        why = told.read_text(encoding="utf-8") if told.is_file() else ""
        return None, why or f"{directory} has no tokenizer files"
    files = (file for file in sorted(directory.iterdir()) if not file.is_dir())
    for file in files:
        if not file.is_file():
            return None, f"{file} is not a regular file"
        if file.suffix in _TEXTS and file.stat().st_size > _FILE_BYTES:
            return None, f"{file} has more than {_FILE_BYTES >> 20} MiB"
    try:
        # False, not unset: unset lets transformers ask on the terminal whether to run code.
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # damaged files raise almost any type, for example KeyError
        why = f"{type(error).__name__}: {error}"
        return None, f"the tokenizer in {directory} cannot be loaded ({why})"
    if why := _too_long(tokenizer):
        return None, f"the tokenizer in {directory} {why}"
    if not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(directory)
    return tokenizer, ""


def _too_long(tokenizer: PreTrainedTokenizerBase) -> str:
    """Why the text of a single token, or what is added to each text, is too long; or ""."""
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        longest *= math.ceil(_growth(backend.decoder))
        longest = max(longest, *(map(_added, (backend.normalizer, backend.post_processor))))
    if longest <= _TOKEN_CHARACTERS:
        return ""
    return f"makes texts of {longest} characters of a token, more than {_TOKEN_CHARACTERS}"


def _rules(part: Any) -> Iterator[dict[str, Any]]:
    """The settings of a part of a compiled tokenizer, of each of its own parts if it is a list."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        rule = waiting.pop()
        inside = [rule.get(name) or [] for name in ("normalizers", "decoders", "processors")]
        waiting += [each for parts in inside for each in parts]
        yield rule


def _growth(part: Any) -> float:
    """Return how many times longer a model's files may make a text, at least 1.

    What Unicode says is left out: at most 18 times, of characters that nobody needs.
    """
    factor = 1.0
    for rule in _rules(part):
        if (content := rule.get("content")) and (pattern := rule.get("pattern")):
            literal = pattern.get("String")
            # An expression may also match nothing, between any two characters.
            factor *= max(1.0, len(content) / len(literal) if literal else len(content) + 1)
        if table := rule.get("precompiled_charsmap"):
            data = base64.b64decode(table)  # the length of an index, the index, then texts
            texts = data[4 + int.from_bytes(data[:4], "little") :]
            factor *= max(1, *map(len, texts.split(b"\0")), 1)
        pieces = [piece for piece in rule.get("single") or [] if "Sequence" in piece]
        factor *= max(1, len(pieces))
    return factor


def _added(part: Any) -> int:
    """Return the number of characters or tokens that are added to each text."""
    added = 0
    for rule in _rules(part):
        ids = {
            name: len(token["ids"]) for name, token in (rule.get("special_tokens") or {}).items()
        }
        pieces = [
            piece["SpecialToken"]["id"]
            for piece in rule.get("single") or []
            if "SpecialToken" in piece
        ]
        added += len(rule.get("prepend") or "") + sum(ids.get(name, 1) for name in pieces)
    return added


def _processor_template(directory: Path) -> str | None:
    """The chat template that a multimodal model keeps beside its tokenizer, if it has one."""
    try:
        found = json.loads(read_small(directory / PROCESSOR_TEMPLATE).decode())
    except (OSError, ValueError, RecursionError):
        return None
    template = found.get("chat_template") if isinstance(found, dict) else None
    return template if isinstance(template, str) else None


def eos_token_ids(
    directory: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Ids that end a text by generation_config.json, the model's configuration or the tokenizer.

    Raises `CheckpointError` where generation_config.json is damaged.
    """
    try:
        ids = _as_ids(read_generation_config(directory).get("eos_token_id"))
    except TypeError as error:
        raise CheckpointError(
            f"{directory / GENERATION_CONFIG} must be a JSON object whose eos_token_id is an id "
            f"or a list of ids: {error}; repair or remove the file"
        ) from error
    for source in (config, config.get_text_config(), tokenizer):
        ids |= _as_ids(getattr(source, "eos_token_id", None))
    return frozenset(ids)


def _as_ids(value: int | Sequence[int] | None) -> set[int]:
    ids = [] if value is None else [value] if isinstance(value, int) else value
    if not isinstance(ids, list | tuple) or not all(type(each) is int for each in ids):
        raise TypeError(f"got {value!r:.80}")
    return set(ids)
