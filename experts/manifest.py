"""The manifest of a store: ``moe-store.json``, written last and checked before use.

It is read as hostile text: every value has a type and a range, file names are plain, and a digest
over all of it detects damage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from experts.files import HeaderError, read_small
from experts.safetensors_io import FileRecord, contained, digest_of, parse_json, write_bytes
from experts.weights import ExpertShape
from kernels.planes import PrefixBits

MANIFEST_NAME = "moe-store.json"
TRUNK_NAME = "trunk.safetensors"
TOWERS_NAME = "towers.safetensors"
"""File of a multimodal model's vision towers; absent where nothing reads images."""
JOURNAL_NAME = "conversion.jsonl"
VERSION = 3
MTP_MODULE = "mtp"
"""The module of a multi-token-prediction layer, whose experts come behind those of the model."""
MAX_MANIFEST_BYTES = 64 << 20

Bits = Literal[2, 3, 4, 8, 16]
Size = Annotated[int, Field(ge=1, le=1 << 31)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors$")]
FloatDtype = Literal["F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"]


class StoreError(ValueError):
    """A store is absent, unfinished, damaged, or does not hold what is asked for."""


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MoELayerRecord(_StrictModel):
    """The experts of one MoE layer, in a file of their own."""

    module: str
    """Name of the experts module in the transformers model."""
    file: FileName
    experts: Annotated[int, Field(ge=1, le=1 << 16)]
    hidden: Size
    intermediate: Size
    parts: Literal[1, 2]
    interleaved: bool
    dtype: FloatDtype
    """Dtype of whole weights, and of the weights before they were quantized."""
    gate_up_bias: FloatDtype | None = None
    down_bias: FloatDtype | None = None
    bits: tuple[PrefixBits, ...] | None = None
    """Bits of the planes of each expert, where they were allotted one by one. null: the store's."""

    @model_validator(mode="after")
    def _has_bits_of_all(self) -> MoELayerRecord:
        if self.bits is not None and len(self.bits) != self.experts:
            raise ValueError(f"{len(self.bits)} numbers of bits for {self.experts} experts")
        return self

    def bits_of(self, expert: int, most: int) -> int:
        """Bits of the longest prefix of an expert with at most ``most`` bits."""
        return most if self.bits is None else min(most, self.bits[expert])

    @property
    def drafts(self) -> bool:
        """It belongs to a multi-token-prediction layer."""
        return self.module.startswith(f"{MTP_MODULE}.")

    def shape(self, group_size: int) -> ExpertShape:
        return ExpertShape(self.hidden, self.intermediate, self.parts, group_size)


class Manifest(_StrictModel):
    """Describes everything in a store but config.json and the tokenizer."""

    format: Literal["moe-store"] = "moe-store"
    version: Literal[3] = 3
    source: str
    """Name of the model that was converted; for people."""
    bits: Bits
    """Bits of planes that are stored of the experts; 16: whole weights."""
    group_size: Literal[32, 64]
    linears: dict[str, PrefixBits]
    """Linear layers of the trunk that are stored as planes, and their bits."""
    layers: tuple[MoELayerRecord, ...] = Field(min_length=1)
    files: dict[FileName, FileRecord]

    def without_drafts(self) -> Manifest:
        """The model without its multi-token-prediction layer, whose files stay listed."""
        layers = tuple(layer for layer in self.layers if not layer.drafts)
        own = f"{MTP_MODULE}."
        linears = {name: bits for name, bits in self.linears.items() if not name.startswith(own)}
        return self.model_copy(update={"layers": layers, "linears": linears})

    @model_validator(mode="after")
    def _is_complete(self) -> Manifest:
        wanted = [TRUNK_NAME, *(layer.file for layer in self.layers)]
        if sorted(wanted) != sorted(self.files.keys() - {TOWERS_NAME}):
            raise ValueError("each layer needs a file of its own, and nothing else is listed")
        most = 0 if self.bits == 16 else self.bits
        if any(layer.bits and max(layer.bits) > most for layer in self.layers):
            raise ValueError("an expert has more bits than the store")
        return self


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Make `directory` a store. Raises OSError."""
    content = manifest.model_dump(mode="json")
    text = json.dumps({"digest": _digest(content), "store": content}, indent=1)
    write_bytes(directory / MANIFEST_NAME, f"{text}\n".encode())


def is_store(directory: Path) -> bool:
    """Return whether this is a store or the remains of one; `read_manifest` tells which."""
    return any((directory / name).exists() for name in (MANIFEST_NAME, TRUNK_NAME, JOURNAL_NAME))


def read_manifest(directory: Path) -> Manifest:
    """Raises `StoreError` naming what is wrong."""
    file = directory / MANIFEST_NAME
    try:
        path = contained(directory, MANIFEST_NAME)
        content = parse_json(read_small(path, MAX_MANIFEST_BYTES), "content")
    except FileNotFoundError as error:
        if not is_store(directory):
            raise StoreError(
                f"{directory} is no store; moe convert MODEL STORE makes one"
            ) from error
        raise StoreError(
            f"{directory} has no {MANIFEST_NAME}: its conversion did not finish, or it was copied "
            "in part; run moe convert again or copy all of it"
        ) from error
    except (OSError, HeaderError) as error:
        raise StoreError(f"{file} cannot be used: {error}") from error
    store, digest = content.get("store"), content.get("digest")
    if not isinstance(store, dict) or content.keys() != {"store", "digest"}:
        raise StoreError(f"{file} needs exactly 'digest' and 'store'")
    if store.get("version") != VERSION:
        raise StoreError(
            f"{file} has format version {str(store.get('version'))[:20]}, this program reads "
            f"version {VERSION}; convert the model again"
        )
    if digest != _digest(store):
        raise StoreError(f"{file} is damaged: its content does not have the digest it states")
    try:
        return Manifest.model_validate_json(json.dumps(store))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StoreError(f"{file} is not valid: {where or 'store'}: {first['msg']}") from error


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return digest_of(canonical.encode()).hexdigest()
