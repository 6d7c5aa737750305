"""From what a user typed to a model directory and a configuration that can be trusted.

A name is a local directory or GGUF file, or else a model on a hub (`moe.loading.remote`), of which
`resolve_model` makes a local one and `reach_model` reads only what is asked for. `config.json` is
data, never code: `auto_map` (names
Python files to run) and every private key (`_attn_implementation_internal` made transformers fetch
a kernel: CVE-2026-4372) are dropped at every level before transformers sees them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from experts.safetensors_io import read_small
from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.checkpoint import LOCAL, ByteSource, Checkpoint
from moe.loading.gguf.directory import gguf_directory
from moe.loading.progress import Report
from moe.loading.remote.download import cached, download
from moe.loading.remote.names import ChosenFiles, HubName
from moe.loading.remote.outline import outline
from moe.loading.remote.reader import HubBytes
from moe.loading.remote.repository import HubUnreachableError, Repository

# Public spellings of private keys, which choose code to run;
# and labels of classifiers, of which transformers makes as many as a number says.
DROPPED_KEYS = {
    *("auto_map", "attn_implementation", "experts_implementation"),
    *("num_labels", "id2label", "label2id"),
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MAX_DEPTH = 32
MAX_SIZE = 1 << 31
# Counts that Python loops over when a configuration or a model is built
MAX_COUNT = {"num_hidden_layers": 512} | dict.fromkeys(EXPERT_COUNTS, 1 << 16)
MANY_LAYERS = 100
"""Up to here the modules of layers that are not there are made sooner than the weights' names are
read twice."""
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
TOP_K = ("num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts", "moe_k")


@dataclass(frozen=True)
class ModelFiles:
    """A model whose headers can be read, wherever its weights are.

    Attributes:
        path: a model directory.
        source: of the bytes of its weights.
        remote: what a download would bring here; None if all is here.
        etags: hashes of the weight files' contents, if remote.
    """

    path: Path
    source: ByteSource = LOCAL
    remote: ChosenFiles | None = None
    etags: tuple[str, ...] = ()


def resolve_model(model: str | Path, report: Report = lambda _: None) -> Path:
    """The directory of `model`: a local one, links resolved, one made for a GGUF file, or a
    snapshot in the hub's cache, which is completed first.

    Args:
        report: called while something is downloaded.

    Raises `CheckpointError` saying what was looked for and what to do.
    """
    name = _locate(model)
    if isinstance(name, Path):
        return name
    try:
        found = download(Repository.find(name), report)
    except HubUnreachableError as error:
        found = _cached(name, error)
    return gguf_directory(found) if found.suffix == ".gguf" else found


@contextmanager
def reach_model(model: str | Path, *, whole: bool) -> Iterator[ModelFiles]:
    """A model without a download: one of a hub that is not in the cache is read where it is.

    Args:
        whole: with its tokenizer and what else a store keeps; not needed for plans.

    Raises `CheckpointError` as `resolve_model`.
    """
    name = _locate(model)
    if isinstance(name, Path):
        yield ModelFiles(name)
        return
    if (found := cached(name)) is None:
        try:
            repository = Repository.find(name)
        except HubUnreachableError as error:
            found = _cached(name, error)
        else:
            outlined = outline(repository, whole=whole)
            with closing(HubBytes(name, outlined.files)) as source:
                etags = tuple(file.etag for file in outlined.files.values())
                yield ModelFiles(outlined.path, source, repository.choice, etags)
            return
    gguf = found.suffix == ".gguf"
    yield ModelFiles(gguf_directory(found, tokenizer=whole) if gguf else found)


def _cached(name: HubName, why: HubUnreachableError) -> Path:
    found = cached(name)
    if found is None:
        raise HubUnreachableError(
            f"no model directory {str(name)!r} (looked in {Path.cwd()}), the hub's cache has no "
            f"complete copy of it, and {why}. Check the spelling and the network, or download it "
            "elsewhere and give its directory"
        ) from why
    return found


def _locate(model: str | Path) -> Path | HubName:
    """The directory of a local model, or a name for the hub."""
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
    name = None if isinstance(model, Path) else HubName.parse(model)
    if name is None:
        raise CheckpointError(
            f"no model directory {str(model)!r} (looked in {Path.cwd()}), and it is not a hub id "
            "(organisation/name, organisation/name:QUANT, either with @REVISION); check the path"
        )
    return name


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
    if is_directory or path.suffix == ".gguf":
        return path.resolve().name.removesuffix(".gguf")
    name = HubName.parse(str(path_or_hub_id))
    return str(path_or_hub_id) if name is None else name.public


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
    _check_layers(config, file)
    return config


def experts_per_token(config: PreTrainedConfig) -> int:
    """How many experts a token visits, whatever the architecture calls it; 1 where nothing says."""
    counts = (getattr(config.get_text_config(), name, None) for name in TOP_K)
    return next((count for count in counts if isinstance(count, int)), 1)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_small(file).decode())
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


def _check_layers(config: PreTrainedConfig, file: Path) -> None:
    """Check that there are weights of so many layers, before as many modules are made."""
    stated = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(stated, int) or stated <= MANY_LAYERS:
        return
    try:
        with Checkpoint.open(file.parent) as checkpoint:
            numbers = [re.search(r"\.(\d+)\.", name) for name in checkpoint.tensors]
    except CheckpointError:  # said by whoever opens them to read; a GGUF file has checked it
        return
    found = len({number[1] for number in numbers if number})
    if found < stated:
        raise CheckpointError(
            f"{file}: num_hidden_layers = {stated}, and the weights beside it are of {found} "
            "layers; correct it, or download the checkpoint again"
        )
