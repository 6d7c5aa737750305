"""Facts that a GGUF file leaves to llama.cpp: what a name in ``tokenizer.ggml.pre`` stands for.

The name says how text is split before merges, whether a piece that is a token stays whole, and
whether a text begins with BOS where the file does not say. The expressions are those of the models'
own ``tokenizer.json``; which name means what is llama.cpp's (``src/llama-vocab.cpp``).
"""

from __future__ import annotations

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
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGITS = (r"\p{N}", *_GPT2)
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
_COHERE2 = (r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _CJK,
    rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
# The model's own class lists the letters with case of an older Unicode, without these scripts.
_UNLISTED = (
    r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}\x{A790}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{16E40}-\x{1DF1E}"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK[4], r"\p{N}")
_FALCON = (r"[\p{P}$+<=>^~|`]+", *_GPT2, "[0-9][0-9][0-9]")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
)
_LINES = (r"\n+",)

SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "trillion", "jais", "phi-2"), _GPT2),
    **dict.fromkeys(("gigachat", "exaone4", "a.x-4.0", "mellum", "granite-docling"), _GPT2),
    **dict.fromkeys(("refact", "starcoder", "command-r", "smollm", "exaone"), _DIGITS),
    **dict.fromkeys(("codeshell", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan", "solar-open", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "kormo", "grok-2"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"), _GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _COHERE2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": _FALCON,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "exaone-moe": _EXAONE_MOE,
    **dict.fromkeys(("gemma4", "sarvam-moe"), _LINES),
}
"""The expressions that split text, each what the one before has left, by llama.cpp's names."""

_LIKE_LLAMA3 = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
}
IGNORE_MERGES = frozenset({*_LIKE_LLAMA3, "tekken", "glm4", "glm5"})
"""Names with which a piece that is a token stays whole, though no merges lead to it."""

ADD_BOS = frozenset({*_LIKE_LLAMA3, "tekken", "gemma4"})
"""Names with which a text begins with BOS where the file does not say."""

PLAIN = frozenset({"gemma4", "sarvam-moe"})
"""Names with which tokens are spelled in characters, with U+2581 for spaces and ``<0x..>`` for
other bytes; the others' are spelled in GPT-2's alphabet of 256 bytes."""
