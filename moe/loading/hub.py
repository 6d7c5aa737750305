"""From what a user typed to a model directory and a configuration that can be trusted.

A name is a local directory, or else a hub id fetched through huggingface_hub's own cache
(`HF_HUB_OFFLINE` and `HF_HOME` as usual). `config.json` is data, never code: `auto_map` (names
Python files to run) and every private key (`_attn_implementation_internal` made transformers fetch
a kernel: CVE-2026-4372) are dropped at every level before transformers sees them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.gguf.directory import gguf_directory

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# Never *.bin / *.pt: pickle weights are not even downloaded
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
# The same weights again, in the layouts of their authors (gpt-oss, Mistral, Llama)
HUB_COPIES = ["original/*", "consolidated*"]
# Public spellings of the private keys above; both choose code to run
DROPPED_KEYS = {"auto_map", "attn_implementation", "experts_implementation"}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MAX_DEPTH = 32
MAX_SIZE = 1 << 31
# Counts that Python loops over when a configuration or a model is built
MAX_COUNT = {"num_hidden_layers": 10_000} | dict.fromkeys(EXPERT_COUNTS, 1 << 16)
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
)
# The dense members of an MoE family (Granite 4) say 0 experts
MAY_BE_ZERO = {"num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"}
TOP_K = ("num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts", "moe_k")


def resolve_model(model: str | Path) -> Path:
    """The directory of `model`: a local one, links resolved, one made for a GGUF file, or a
    snapshot in the hub's cache.

    Raises `CheckpointError` saying what was looked for and what to do.
    """
    if not str(model):
        raise CheckpointError("the model name is empty; give a directory or organisation/name")
    local, is_directory, is_file = _look_up(model)
    if is_directory:
        return local.resolve()
    if is_file and local.suffix == ".gguf":
        return gguf_directory(local)
    if is_file:
        raise CheckpointError(
            f"{local} is a file; give the directory that holds config.json and *.safetensors, or a "
            ".gguf file"
        )
    name = str(model)
    if isinstance(model, Path) or not HUB_ID.fullmatch(name) or ".." in name or "--" in name:
        raise CheckpointError(
            f"no model directory {name!r} (looked in {Path.cwd()}), and it is not a hub id of the "
            "form organisation/name; check the path"
        )
    try:
        snapshot = snapshot_download(name, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_COPIES)
        return Path(snapshot)
    except Exception as error:  # huggingface_hub raises OSError, ValueError and httpx's own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CheckpointError(
            f"no model directory {name!r} (looked in {Path.cwd()}), and the hub could not give a "
            f"model of that id: {type(error).__name__}: {reason}. Check the spelling and the "
            "network, or download it elsewhere and give its directory (HF_HUB_OFFLINE=1 uses the "
            "local cache only)"
        ) from error


def _look_up(model: str | Path) -> tuple[Path, bool, bool]:
    """Where a name is here, whether it is a directory, and whether a file."""
    try:
        local = Path(model).expanduser()
        is_directory = local.is_dir()
        return local, is_directory, not is_directory and local.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL byte, an unknown ~user
        name = str(model) if len(str(model)) < 200 else f"{str(model)[:200]}..."
        why = error.strerror if isinstance(error, OSError) else error  # without the name again
        raise CheckpointError(f"{name!r} is not a usable model name: {why}") from error


def public_name(path_or_hub_id: str | Path) -> str:
    """What clients call a model: its hub id, or the name of its directory or GGUF file.

    Raises `CheckpointError` for what is no name at all.
    """
    path, is_directory, _ = _look_up(path_or_hub_id)
    local = is_directory or path.suffix == ".gguf"
    return path.resolve().name.removesuffix(".gguf") if local else str(path_or_hub_id)


def read_config(path: Path) -> PreTrainedConfig:
    """The configuration in `path`/config.json, as transformers' own class for its model_type.

    Raises `CheckpointError` when it is absent, not JSON or not sensible, `UnsupportedModelError`
    for a model_type that the installed transformers does not know. Runs no code from `path`.
    """
    file = path / "config.json"
    raw = _read_json(file)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(f"{file} has no model_type, so its architecture is unknown")
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{file}: model_type {model_type!r} is not in the installed transformers "
            f"{transformers.__version__}; a newer version may have it"
        )
    _check_sizes(raw, file)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(raw)
    except Exception as error:  # each architecture validates in its own way, with its own types
        raise CheckpointError(
            f"{file} is not a valid {model_type} configuration: {type(error).__name__}: {error}"
        ) from error
    _check_experts(config, file)
    return config


def experts_per_token(config: PreTrainedConfig) -> int:
    """How many experts a token visits, whatever the architecture calls it; 1 where nothing says."""
    counts = (getattr(config.get_text_config(), name, None) for name in TOP_K)
    return next((count for count in counts if isinstance(count, int)), 1)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        # Infinity is written as {"__float__": "Infinity"}, which is no private key
        content = _without_code(PreTrainedConfig._decode_special_floats(content))
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
            if key not in DROPPED_KEYS and not key.startswith("_")
        }
    if isinstance(value, list):
        return [_without_code(item, depth + 1) for item in value]
    return value


def _check_sizes(raw: dict[str, Any], file: Path, prefix: str = "") -> None:
    """Sizes are positive integers, before anything is built or allocated from them."""
    for key, value in raw.items():
        if isinstance(value, dict):
            _check_sizes(value, file, f"{prefix}{key}.")
        elif key in SIZE_KEYS and value is not None and not isinstance(value, list):
            least, most = 0 if key in MAY_BE_ZERO else 1, MAX_COUNT.get(key, MAX_SIZE)
            if type(value) is not int or not least <= value <= most:
                raise CheckpointError(
                    f"{file}: {prefix}{key} must be an integer from {least} to {most}, "
                    f"given {value!r}"
                )


def _check_experts(config: PreTrainedConfig, file: Path) -> None:
    text = config.get_text_config()
    experts = next((n for n in EXPERT_COUNTS if type(getattr(text, n, None)) is int), None)
    top_k = next((n for n in TOP_K if type(getattr(text, n, None)) is int), None)
    if experts is not None and top_k is not None:
        count, chosen = getattr(text, experts), getattr(text, top_k)
        if count > 0 and not 0 < chosen <= count:
            raise CheckpointError(
                f"{file}: {top_k} = {chosen} must lie between 1 and {experts} = {count}: "
                "a token cannot be sent to more experts than there are"
            )
