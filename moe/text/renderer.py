"""Runs chat templates, as the program of helper processes (`moe.helper_process`).

A chat template comes with a model, and jinja2's sandbox limits what it may touch, not what it
costs: ``'a' * 3000000000`` is one operation that no tracing interrupts. This calls transformers'
own `apply_chat_template`, so that texts are the same as there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import types
from functools import lru_cache
from typing import Any


def answer(request: bytes) -> bytes:
    """A template, special tokens, messages and options as JSON to the text, or why there is none:
    ``text``, ``syntax`` (the template cannot be read) or ``fault`` (it refused the messages)."""
    asked = json.loads(request)
    try:
        text = _stand_in()(asked["template"], asked["special"]).apply_chat_template(
            asked["messages"], tokenize=False, **asked["options"]
        )
        return json.dumps({"text": text}).encode()
    except MemoryError:
        raise
    except Exception as error:  # a template may fail in any way a program can
        message = f"{error!s:.300}" or type(error).__name__
        if type(error).__name__ == "TemplateSyntaxError":  # jinja2's, which transformers imports
            message = f"line {error.lineno}: {message}"  # type: ignore[attr-defined]
            return json.dumps({"syntax": message}).encode()
        return json.dumps({"fault": message}).encode()


@lru_cache(maxsize=1)
def _stand_in() -> type:
    """A tokenizer's class that has a template and special tokens, and cannot do anything else."""
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


def prepare() -> None:
    """Import what templates need, before the first request comes."""
    _stand_in()
