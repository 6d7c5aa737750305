"""What a generated text has to be: JSON, JSON of a schema, a match, one of some texts, a sentence.

Only the wish is here; `moe.sampling.constraint` makes a sequence follow it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe.errors import RequestError

KINDS = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
}
MAX_SOURCE = 2**16


@dataclass(frozen=True, slots=True)
class Structure:
    """The whole of a generated text has to be like this; made by one of the functions below.

    Whether it can be followed is found out with a model (`moe.sampling.constraint`), as that takes
    time. Raises `RequestError` where it cannot be anything of the kind.

    Attributes:
        kind: one of `KINDS`.
        source: what is to be followed; JSON of a schema or of a list of choices.
        parts: where we have made it of what others wrote, that, and what they call it.
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
        if len(self.source) > MAX_SOURCE:
            raise RequestError(
                f"a {name} may have {MAX_SOURCE} characters, got {len(self.source)}; shorten it"
            )
        if not _is_unicode(self.source):
            raise RequestError(f"a {name} must be valid Unicode, got a lone surrogate; remove it")

    @classmethod
    def json_object(cls) -> Structure:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Structure:
        """JSON that a schema describes, given as it is or as its JSON.

        Keywords that cannot be enforced are refused when a request is made.
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
        """What messages call it."""
        return f"the {KINDS[self.kind]}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
