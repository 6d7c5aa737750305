"""From what a user typed to a model directory and a configuration that can be trusted.

A name is a local directory or GGUF file, or else a model on a hub (`moe.loading.remote`), of which
`resolve_model` makes a local one and `reach_model` reads only what is asked for. `config.json` is
data, never code: `auto_map` (names
Python files to run) and every private key (`_attn_implementation_internal` made transformers fetch
a kernel: CVE-2026-4372) are dropped at every level before transformers sees them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.checkpoint import LOCAL, ByteSource, Checkpoint
from moe.loading.config_file import EXPERT_COUNTS, check_sizes, read_json
from moe.loading.gguf.directory import gguf_directory
from moe.loading.local import locate
from moe.loading.progress import Report
from moe.loading.remote.download import cached, download
from moe.loading.remote.names import ChosenFiles, HubName
from moe.loading.remote.outline import outline
from moe.loading.remote.reader import HubBytes
from moe.loading.remote.repository import HubUnreachableError, Repository

MANY_LAYERS = 100
"""Up to here the modules of layers that are not there are made sooner than the weights' names are
read twice."""
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
    name = _local(model)
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
    name = _local(model)
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


def _local(model: str | Path) -> Path | HubName:
    """The directory of a local model, or a name for the hub."""
    found = locate(model)
    return gguf_directory(found) if isinstance(found, Path) and found.is_file() else found


def _cached(name: HubName, why: HubUnreachableError) -> Path:
    found = cached(name)
    if found is None:
        raise HubUnreachableError(
            f"no model directory {str(name)!r} (looked in {Path.cwd()}), the hub's cache has no "
            f"complete copy of it, and {why}. Check the spelling and the network, or download it "
            "elsewhere and give its directory"
        ) from why
    return found


def read_config(path: Path) -> PreTrainedConfig:
    """The configuration in `path`/config.json, as transformers' own class for its model_type.

    Raises `CheckpointError` when it is absent, not JSON or not sensible, `UnsupportedModelError`
    for a model_type that the installed transformers does not know. Runs no code from `path`.
    """
    file = path / "config.json"
    raw = read_json(file)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(f"{file} has no model_type, so its architecture is unknown")
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{file}: model_type {model_type!r} is not in the installed transformers "
            f"{transformers.__version__}; a newer version may have it"
        )
    check_sizes(raw, file)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(PreTrainedConfig._decode_special_floats(raw))
    except Exception as error:  # each architecture validates in its own way, with its own types
        raise CheckpointError(
            f"{file} is not a valid {model_type} configuration: {type(error).__name__}: {error}"
        ) from error
    _check_experts(config, file)
    _check_layers(config, file)
    return config


def experts_per_token(config: PreTrainedConfig) -> int:
    """Return how many experts a token visits, whatever the architecture calls it; 1 where nothing
    says."""
    counts = (getattr(config.get_text_config(), name, None) for name in TOP_K)
    return next((count for count in counts if isinstance(count, int)), 1)


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
