"""Random models of 1.7 billion parameters: large enough to measure speed.

    python -m examples.models.random_models

`random_2b` is a Qwen3-MoE, `random_hybrid` a Qwen3.5-MoE, three of whose four layers are gated
delta rules. Both have 16 layers, hidden size 1024, 64 experts of width 512, top-8: 7 GB in float32.
They say nothing sensible, and their routing has no locality. Their tokenizer is made by a rule, not
learnt. They have no end token, so their answers are as long as asked for. Each is written once,
into $BENCHMARKS_DIR (default: moe-benchmarks in the system's folder for temporary files).
"""

from __future__ import annotations

import json
import os
import shutil
import string
import tempfile
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe.machine import memory_available

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
HYBRID: dict[str, Any] = SHAPE | {
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""With states of 12 MB for a sequence, a third of what the weights of a token take at 4 bits."""
PARAMETERS = 1_720_749_056
MEMORY = 2.2 * 4 * PARAMETERS
"""Bytes of memory needed to make the checkpoint; more than to serve it."""


def bench_dir() -> Path:
    """The folder where benchmarks keep large and generated files."""
    own = os.environ.get("BENCHMARKS_DIR")
    folder = Path(own) if own else Path(tempfile.gettempdir()) / "moe-benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def random_2b() -> Path | None:
    """Folder of the checkpoint, made at the first call. None, and the reason printed, if memory or
    disk are short."""
    return _random_model("random-2b", "qwen3_moe", SHAPE)


def random_hybrid() -> Path | None:
    """As `random_2b`."""
    return _random_model("random-hybrid", "qwen3_5_moe_text", HYBRID)


def _random_model(name: str, model_type: str, shape: dict[str, Any]) -> Path | None:
    folder = bench_dir() / name
    if (folder / "config.json").exists():
        return folder
    memory, disk = memory_available() or 0, shutil.disk_usage(folder.parent).free
    for what, free, needed in (
        ("memory", memory, MEMORY),
        (f"disk in {folder.parent}", disk, 5 * PARAMETERS),
    ):
        if free < needed:
            print(f"skipped: {name} needs {needed / 1e9:.0f} GB of {what}, not {free / 1e9:.0f}")
            return None
    unfinished = folder.with_suffix(".unfinished")
    config = CONFIG_MAPPING[model_type](**shape, dtype=torch.float32)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    assert 1 <= model.num_parameters() / PARAMETERS < 1.1
    # With transformers' 0.02 attention drowns the token, and all tokens of a prompt go to the same
    # experts: 35 of 64 for 2,048 tokens.
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    model.save_pretrained(unfinished, max_shard_size="1GB")
    tokenizer(config.vocab_size).save_pretrained(unfinished)
    return unfinished.rename(folder)


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE without training: the 256 bytes, then " a" to " z", " aa", ... in order."""
    vocab = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = (
        ("Ġ" + "".join(letters[:-1]), letters[-1])
        for length in range(1, 5)
        for letters in product(string.ascii_lowercase, repeat=length)
    )
    merges = list(islice(words, vocab_size - len(vocab)))
    vocab |= {"".join(pair): len(vocab) + index for index, pair in enumerate(merges)}
    bpe = Tokenizer(models.BPE(vocab, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def without_end(model: Path) -> Path:
    """A copy of a model in which no token ends a text."""
    folder = bench_dir() / f"{model.name}-without-end"
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        copy = folder / file.name
        if file.name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            settings = json.loads(file.read_text())
            copy.write_text(json.dumps({k: v for k, v in settings.items() if "eos" not in k}))
        else:
            shutil.copyfile(file, copy)
    return folder


if __name__ == "__main__":
    print(random_2b(), random_hybrid())
