"""What a model's directory says about text: its tokenizer and the tokens that end a text.

Code that a directory may hold is never run; a tokenizer that needs it counts as unusable.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe.errors import CheckpointError
from moe.loading.generation_config import FILE, read

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_PATTERNS = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")


def load_tokenizer(directory: Path) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The tokenizer in a local directory and "", or None and the reason why there is none."""
    from transformers import AutoTokenizer

    # transformers makes an empty tokenizer of some architectures where the files are absent.
    if not any(any(directory.glob(pattern)) for pattern in _PATTERNS):
        return None, f"{directory} has no tokenizer files"
    try:
        # False, not unset: unset lets transformers ask on the terminal whether to run code.
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # damaged files surface as almost any type, KeyError for one
        why = f"{type(error).__name__}: {error}"
        return None, f"the tokenizer in {directory} cannot be loaded ({why})"
    return tokenizer, ""


def eos_token_ids(
    directory: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Ids that end a text by generation_config.json, the model's configuration or the tokenizer.

    Raises `CheckpointError` where generation_config.json is damaged.
    """
    ids = _generation_eos(directory)
    for source in (config, config.get_text_config(), tokenizer):
        ids |= _as_ids(getattr(source, "eos_token_id", None))
    return frozenset(ids)


def _generation_eos(directory: Path) -> set[int]:
    try:
        return _as_ids(read(directory).get("eos_token_id"))
    except TypeError as error:
        raise CheckpointError(
            f"{directory / FILE} must be a JSON object whose eos_token_id is an id or a list of "
            f"ids: {error}; repair or remove the file"
        ) from error


def _as_ids(value: int | Sequence[int] | None) -> set[int]:
    ids = [] if value is None else [value] if isinstance(value, int) else value
    if not isinstance(ids, list | tuple) or not all(type(each) is int for each in ids):
        raise TypeError(f"got {value!r:.80}")
    return set(ids)
