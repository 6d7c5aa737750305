"""The tokenizer of a GGUF file, as the files that transformers reads.

transformers makes it from the file's keys. Of a byte-level BPE the file gives only the name of how
text is split before merges (``tokenizer.ggml.pre``), so the expressions stand here; they are those
of the models' own ``tokenizer.json``. A name that is not known would give other tokens than the
model was trained on, so such a tokenizer is refused.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from moe.errors import UnsupportedModelError
from moe.text.tokenizer import WHY_NONE

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{{0}}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{{0}}"
)
_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_LLAMA3 = (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",)
_QWEN2 = (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_GPT4O = (
    _CASED.replace("{0}", f"{_CONTRACTIONS}?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_TEKKEN = (_CASED.replace("{0}", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "trillion"), _GPT2),
    **dict.fromkeys(("refact", "starcoder", "command-r", "smollm", "exaone"), (r"\p{N}", *_GPT2)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"),
        _LLAMA3,
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan", "solar-open", "megrez"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), _GPT4O),
    "tekken": _TEKKEN,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
}
"""The expressions that split text, each what the one before has left, by llama.cpp's names."""

_logger = logging.getLogger(__name__)


def write_tokenizer(directory: Path, file: str, metadata: dict[str, object]) -> None:
    """Write the tokenizer of a GGUF file in a model directory; where it cannot be used, why."""
    if not metadata.get("tokenizer.ggml.tokens"):
        return
    try:
        _made(directory, file, metadata).save_pretrained(directory)
    except Exception as error:  # as of any damaged tokenizer
        why = f"the GGUF file's tokenizer cannot be used: {error or type(error).__name__}"
        (directory / WHY_NONE).write_text(why, encoding="utf-8")
        _logger.warning("%s; prompts can only be token ids", why)


def _made(directory: Path, file: str, metadata: dict[str, object]) -> Any:
    from tokenizers import Regex, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, split = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind == "gpt2" and split not in SPLITS:
        raise UnsupportedModelError(
            f"it splits text as {split!r} (tokenizer.ggml.pre), which is not known; known are "
            f"{', '.join(sorted(SPLITS))}"
        )
    # not AutoTokenizer: it reads the model's configuration first, and cannot read gpt-oss's
    made = PreTrainedTokenizerFast.from_pretrained(directory, gguf_file=file, local_files_only=True)
    if kind == "gpt2":
        expressions = [
            pre_tokenizers.Split(Regex(own), behavior="isolated") for own in SPLITS[str(split)]
        ]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*expressions, byte_level])
    return made
