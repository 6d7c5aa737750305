"""Models on this machine, as far as a name and small files tell: before torch is imported.

`check_model` refuses at once what a load would refuse seconds later, when it has imported what
builds networks.
"""

from __future__ import annotations

import re
from pathlib import Path

from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.config_file import check_dense, check_sizes, read_json
from moe.loading.remote.names import HubName

ADAPTER_CONFIG = "adapter_config.json"


def check_model(model: str | Path) -> None:
    """Refuse a name that means nothing, and a model here that cannot be loaded.

    Raises:
        CheckpointError: there is no such model, or its configuration makes no sense.
        UnsupportedModelError: it has no experts.
    """
    found = locate(model)
    if not isinstance(found, Path):
        return
    if found.is_file():
        _check_gguf(found)
        return
    file = found / "config.json"
    if not file.exists():
        _check_adapter(found)
    config = read_json(file)
    check_sizes(config, file)
    check_dense(config, file)


def _check_adapter(directory: Path) -> None:
    """Raise `UnsupportedModelError` for a directory that holds an adapter and no model."""
    file = directory / ADAPTER_CONFIG
    if file.exists():
        base = read_json(file).get("base_model_name_or_path")
        of = repr(base) if isinstance(base, str) and len(base) < 200 else "its base model"
        raise UnsupportedModelError(
            f"{directory} is an adapter (LoRA) for {of}, not a model: merge it into that model "
            "(peft's merge_and_unload), save the result, and give its directory"
        )


def _check_gguf(file: Path) -> None:
    from moe.loading.gguf.header import package  # numpy
    from moe.loading.gguf.parts import check_experts, parts_of, read_headers

    package()
    metadata, tensors = read_headers([part.resolve() for part in parts_of(file)])
    try:
        check_experts(metadata.get("general.architecture"), tensors)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{file}: {error}") from None


def locate(model: str | Path) -> Path | HubName:
    """The directory of a local model, links resolved, its GGUF file, or a name for the hub.

    Raises `CheckpointError` for what is none of these.
    """
    if not str(model):
        raise CheckpointError("the model name is empty; give a directory or organisation/name")
    local, is_directory, is_file = _look_up(model)
    if is_directory:
        return local.resolve()
    if is_file and local.suffix == ".gguf":
        return local
    if is_file:
        raise CheckpointError(
            f"{local} is a file; give the directory that holds config.json and *.safetensors, or a "
            ".gguf file"
        )
    name = None if isinstance(model, Path) else HubName.parse(model)
    if name is None:
        raise CheckpointError(
            f"no model directory {str(model)!r} (looked in {Path.cwd()}), and it is not a hub id "
            "(organisation/name, organisation/name:QUANT, either with @REVISION); "
            + _what_else(str(model))
        )
    return name


def _what_else(model: str) -> str:
    """Guess what a name that is no model's may have been meant for."""
    if model.isdecimal():
        return f"a port is given by --port {model}"
    on_hub = re.fullmatch(r"(?:https?://)?(?:hf\.co|huggingface\.co)/([^/\s]+/[^/\s]+)/?", model)
    if on_hub is not None:
        return f"write {on_hub[1]}"
    if "/" not in model and not Path(model).suffix:
        return "Ollama's names mean nothing here: write the organisation, too, or check the path"
    return "check the path"


def _look_up(model: str | Path) -> tuple[Path, bool, bool]:
    """Find a name on this machine: its path, whether it is a directory, and whether a file."""
    try:
        local = Path(model).expanduser()
        is_directory = local.is_dir()
        return local, is_directory, not is_directory and local.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL byte, an unknown ~user
        name = str(model) if len(str(model)) < 200 else f"{str(model)[:200]}..."
        why = error.strerror if isinstance(error, OSError) else error  # without the name again
        raise CheckpointError(f"{name!r} is not a usable model name: {why}") from error


def public_name(path_or_hub_id: str | Path) -> str:
    """Return clients' name of a model: its hub id, or the name of its directory or GGUF file.

    Raises `CheckpointError` for what is no name at all.
    """
    path, is_directory, _ = _look_up(path_or_hub_id)
    if is_directory or path.suffix == ".gguf":
        return path.resolve().name.removesuffix(".gguf")
    name = HubName.parse(str(path_or_hub_id))
    return str(path_or_hub_id) if name is None else name.public
