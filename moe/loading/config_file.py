"""`config.json` of a model directory: read as data, checked, and asked whether there are experts.

No torch is imported here, so what is wrong with a configuration shows at once. `config.json` is
data, never code: `auto_map` (names Python files to run) and every private key
(`_attn_implementation_internal` made transformers fetch a kernel: CVE-2026-4372) are dropped at
every level before transformers sees them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experts.files import read_small
from moe.errors import CheckpointError, UnsupportedModelError

# Public spellings of private keys, which choose code to run;
# and labels of classifiers, of which transformers makes as many as a number says.
DROPPED_KEYS = {
    *("auto_map", "attn_implementation", "experts_implementation"),
    *("num_labels", "id2label", "label2id"),
}
_INFINITY = "__float__"
"""transformers writes infinity as ``{"__float__": "Infinity"}``, which is no private key."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MAX_DEPTH = 32
MAX_SIZE = 1 << 31
# Counts that Python loops over when a configuration or a model is built
MAX_COUNT = {"num_hidden_layers": 512} | dict.fromkeys(EXPERT_COUNTS, 1 << 16)
SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
    "sliding_window",
)
# The dense members of an MoE family (Granite 4) say 0 experts
MAY_BE_ZERO = {
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    "sliding_window",
}


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file, without keys that choose code. Raises `CheckpointError`."""
    try:
        content = json.loads(read_small(file).decode())
        content = _without_code(content)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no config.json in {file.parent}: is it a model directory in Hugging Face format? "
            "(Of GGUF files, name the file.)"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a valid JSON configuration: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a JSON {type(content).__name__}, not an object")
    return content


def _without_code(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {
            key: _without_code(item, depth + 1)
            for key, item in value.items()
            if key not in DROPPED_KEYS and (key == _INFINITY or not key.startswith("_"))
        }
    if isinstance(value, list):
        return [_without_code(item, depth + 1) for item in value]
    return value


def check_sizes(raw: dict[str, Any], file: Path, prefix: str = "") -> None:
    """Raise `CheckpointError` unless sizes are positive integers, before anything is built or
    allocated from them."""
    for key, value in raw.items():
        if isinstance(value, dict):
            check_sizes(value, file, f"{prefix}{key}.")
        elif key in SIZE_KEYS and value is not None and not isinstance(value, list):
            # Latent attention calls the size of its rotary part so, which may be absent
            no_rotary = key == "head_dim" and raw.get("qk_rope_head_dim") == 0
            least, most = (
                int(key not in MAY_BE_ZERO and not no_rotary),
                MAX_COUNT.get(key, MAX_SIZE),
            )
            if type(value) is not int or not least <= value <= most:
                raise CheckpointError(
                    f"{file}: {prefix}{key} must be an integer from {least} to {most}, "
                    f"given {value!r}"
                )


def check_dense(config: Mapping[str, Any], file: Path) -> None:
    """Raise `UnsupportedModelError` for a model that has no experts, where this is certain.

    What is not certain is left to the load, which builds the network (`moe.network.adopt`).
    """
    if _is_dense(config):
        raise UnsupportedModelError(
            f"{file}: {config['model_type']!r} is a dense model: it has no experts, which are what "
            "moe takes over; llama.cpp, Ollama and vLLM run dense models"
        )


def _is_dense(config: Mapping[str, Any]) -> bool:
    """Return whether transformers' code of an architecture never speaks of experts, or the
    configuration says that there are none; False where parts of a model are of architectures
    unknown here."""
    sources = list(_sources(config.get("model_type")))
    if any("xpert" in source for source in sources):
        counts = [config[name] for name in EXPERT_COUNTS if name in config]
        return bool(counts) and all(count == 0 for count in counts)
    parts = [part for part in config.values() if isinstance(part, dict) and "model_type" in part]
    if any("AutoModel" in source for source in sources) and not (
        config.get("text_config") in parts and len(parts) == len(_parts(config))
    ):
        return False
    return bool(sources) and all(map(_is_dense, parts))


def _parts(config: Mapping[str, Any]) -> list[str]:
    return [key for key, part in config.items() if key.endswith("_config") and part]


def _sources(model_type: object) -> Iterator[str]:
    """Yield the sources of transformers' modules that compute an architecture; nothing is
    imported."""
    found = find_spec("transformers")
    name = str(model_type).replace("-", "_")
    if found is None or not found.submodule_search_locations or not name.isidentifier():
        return
    folder = Path(found.submodule_search_locations[0], "models", name)
    for file in folder.glob("modeling_*.py"):
        yield file.read_text(encoding="utf-8")
