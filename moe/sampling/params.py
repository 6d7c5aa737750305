"""`SamplingParams` and `Structure`: the sampling of a request, validated once when it is made."""

from __future__ import annotations

import json
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat, SupportsIndex

from moe.errors import RequestError

KINDS = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
}
MAX_SOURCE = 2**16
MAX_GENERATED = 2**18
"""Characters of a grammar that is made of several structures; the last few hundred are kept."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The form of a whole generated text; made by one of the class methods.

    `moe.sampling.constraint` enforces it, and checks whether it can be followed, which takes time.
    Raises `RequestError` if it is not valid at all.

    Attributes:
        kind: one of `KINDS`.
        source: the pattern or grammar; for a schema or choices, their JSON.
        parts: if the source was generated from structures of the client: these, with the names
            that error messages use.
    """

    kind: str
    source: str
    parts: tuple[tuple[str, Structure], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(
                f"the kind of a structure must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        name = KINDS[self.kind]
        if not isinstance(self.source, str) or not self.source.strip():
            raise RequestError(
                f"a {name} must be a text that is not empty, got {self.source!r:.80}"
            )
        if not self.parts and len(self.source) > MAX_SOURCE:
            raise RequestError(
                f"a {name} may have {MAX_SOURCE} characters, got {len(self.source)}; shorten it"
            )
        if len(self.source) > MAX_GENERATED:
            raise RequestError(
                f"the schemas of a request may make a grammar of {MAX_GENERATED} characters, got "
                f"{len(self.source)}; shorten them, or send fewer tools"
            )
        if not _is_unicode(self.source):
            raise RequestError(f"a {name} must be valid Unicode, got a lone surrogate; remove it")

    @classmethod
    def json_object(cls) -> Structure:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Structure:
        """JSON that follows a schema, which is given as an object or as JSON text.

        A request with a keyword that cannot be enforced is refused.
        """
        try:
            tree = json.loads(schema) if isinstance(schema, str) else schema
            source = json.dumps(tree)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"a JSON schema must be JSON ({error}), got {schema!r:.100}"
            ) from None
        if not isinstance(tree, Mapping):
            raise RequestError(f"a JSON schema must be an object, got {schema!r:.100}")
        return cls("json_schema", source)

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """Text that matches from its beginning to its end, in the syntax of Rust's ``regex``."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Structure:
        """One of these texts."""
        rule = "choices must be a list of texts, at least one and none of them empty"
        if not isinstance(texts, Sequence) or isinstance(texts, str) or not texts:
            raise RequestError(f"{rule}, got {texts!r:.100}")
        for text in texts:
            if not isinstance(text, str) or not text or not _is_unicode(text):
                raise RequestError(f"{rule}, got {text!r:.100}")
        return cls("choice", json.dumps(list(texts)))

    @classmethod
    def grammar(cls, text: str, parts: Iterable[tuple[str, Structure]] = ()) -> Structure:
        """A sentence of a context-free grammar: Lark's syntax as llguidance has it, or GBNF."""
        return cls("grammar", text, tuple(parts))

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return f"the {KINDS[self.kind]}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class ThinkingBudget:
    """A limit on the reasoning before an answer; made by `TextCodec.thinking_budget`.

    Attributes:
        tokens: after so many tokens of reasoning its end is forced; 0: at once.
        open, close: what begins and ends it. Space does not matter.
        close_ids: token ids that end it.
        inside: the prompt has begun it.
        reopens: it may begin again behind its end (with channels); the tokens count on.
    """

    tokens: int
    open: str
    close: str
    close_ids: tuple[int, ...]
    inside: bool
    reopens: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _whole("thinking_token_budget", self.tokens, 0))
        object.__setattr__(self, "close_ids", tuple(self.close_ids))


MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The choice of tokens and the end of generation; the defaults change nothing about the model.

    Numbers and collections are normalised to int, float, tuples and dictionaries, so that equal
    requests compare equal. Raises `RequestError` naming the field, the rule and the value.
    """

    max_new_tokens: int | None = 128
    """Tokens generated at most, >= 1; None: as many as context and memory have room for."""
    temperature: float = 1.0
    """Divisor of the logits, finite and >= 0; 0 always takes the most likely token."""
    top_p: float = 1.0
    """Probability mass kept, in [0, 1]; 1 keeps all, 0 the most likely token."""
    top_k: int = 0
    """Number of tokens kept, >= 0; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this times as likely as the most likely one, in [0, 1]; 0 keeps all."""
    repetition_penalty: float = 1.0
    """> 0; divides positive and multiplies negative logits of prompt and generated tokens."""
    presence_penalty: float = 0.0
    """In [-2, 2]; subtracted from the logit of every token generated so far."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; subtracted once for each time that a token was generated."""
    seed: int | None = None
    """In [-2**63, 2**63 - 1]; None takes a new one each time, and so does -1, as in vLLM and
    llama.cpp."""
    stop: tuple[str, ...] = ()
    """Text ends before the first of these strings; a single string may be given as it is. One that
    is the name of a special token, such as ``<|im_end|>``, also ends it before that token."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation, in addition to the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    logprobs: int | None = None
    """Most likely tokens reported with their log-probabilities, in [0, 20]; 0 reports the chosen
    token's alone, None nothing."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, each after those before it; None: nothing."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these token ids before anything else; each in [-100, 100]."""
    n: int = 1
    """Sequences generated for the prompt, in [1, 128]."""
    min_tokens: int = 0
    """Tokens generated at least, before an end token, a stop token or a stop string counts."""
    thinking: ThinkingBudget | None = None
    """A limit on the reasoning before an answer; None: none."""
    structure: Structure | None = None
    """The form that the text must have. A sequence that ends by itself (``stop``) has it, unless a
    stop string or one of ``stop_token_ids`` cut it."""

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "temperature": _real("temperature", self.temperature, 0, hint="0 is greedy"),
            "top_p": _real("top_p", self.top_p, 0, 1, hint="1 keeps every token"),
            "top_k": _whole("top_k", self.top_k, 0, hint="0 keeps every token"),
            "min_p": _real("min_p", self.min_p, 0, 1, hint="0 keeps every token"),
            "repetition_penalty": _real(
                "repetition_penalty", self.repetition_penalty, 0, above=True, hint="1 is neutral"
            ),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -2, 2),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "logit_bias": _logit_bias(self.logit_bias),
            "n": _whole("n", self.n, 1, MAX_SEQUENCES),
            "min_tokens": _whole("min_tokens", self.min_tokens, 0, hint="0 is none"),
        }
        if self.max_new_tokens is not None:
            most = checked["max_new_tokens"] = _whole("max_new_tokens", self.max_new_tokens, 1)
            if self.min_tokens > most:
                rule = f"at most max_new_tokens ({most})"
                raise _error("min_tokens", rule, self.min_tokens, "")
        if self.seed is not None:
            seed = _whole("seed", self.seed, MIN_SEED, MAX_SEED, "None picks one")
            checked["seed"] = None if seed == -1 else seed
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                checked[name] = _whole(name, count, 0, MAX_LOGPROBS)
        if not isinstance(self.structure, Structure | None):
            raise RequestError(f"structure must be a Structure or None, got {self.structure!r}")
        if not isinstance(self.thinking, ThinkingBudget | None):
            raise RequestError(f"thinking must be a ThinkingBudget or None, got {self.thinking!r}")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def kept_mass(self) -> float:
        """`top_p`, but above 0: tokens are kept while the mass before them is below it, so that the
        first one always is."""
        return max(self.top_p, sys.float_info.min)


def _whole(
    name: str, value: SupportsIndex, low: int, high: int | None = None, hint: str = ""
) -> int:
    rule = f"a whole number {_interval(low, high)}"
    try:
        number = operator.index(value)
    except TypeError:
        raise _error(name, rule, value, hint) from None
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise _error(name, rule, value, hint)
    return number


def _real(
    name: str,
    value: SupportsFloat,
    low: float,
    high: float | None = None,
    *,
    above: bool = False,
    hint: str = "",
) -> float:
    """A finite number in [low, high], or in (low, high] with `above`."""
    rule = f"a finite number {_interval(low, high, above)}"
    if isinstance(value, (bool, str, bytes)):
        raise _error(name, rule, value, hint)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _error(name, rule, value, hint) from None
    too_low = number <= low if above else number < low
    if not math.isfinite(number) or too_low or (high is not None and number > high):
        raise _error(name, rule, value, hint)
    return number


def _interval(low: float, high: float | None, above: bool = False) -> str:
    if high is None:
        return f"{'>' if above else '>='} {low}"
    return f"in {'(' if above else '['}{low}, {high}]"


def _error(name: str, rule: str, value: object, hint: str) -> RequestError:
    return RequestError(f"{name} must be {rule}, got {value!r}" + (f"; {hint}" if hint else ""))


def _stop_strings(stop: str | Iterable[Any]) -> tuple[str, ...]:
    rule = "stop must be a non-empty string or a list of them"
    strings = (stop,) if isinstance(stop, str) else _items(stop, rule)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"{rule}, got {string!r}; leave it out to stop at no string")
    return strings


def _stop_token_ids(ids: Iterable[Any]) -> tuple[int, ...]:
    rule = "stop_token_ids must be a list of whole numbers >= 0"
    return tuple(_whole("stop_token_ids entries", item, 0) for item in _items(ids, rule))


def _logit_bias(biases: Mapping[Any, Any]) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {biases!r}")
    return {
        _whole("logit_bias token ids", token_id, 0): _real("logit_bias values", bias, -100, 100)
        for token_id, bias in biases.items()
    }


def _items(values: object, rule: str) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise RequestError(f"{rule}, got {values!r}")
    return tuple(values)
