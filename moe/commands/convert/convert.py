"""``moe convert``: convert a checkpoint to a store, one MoE layer in memory at a time.

The files are written to ``OUT.unfinished``; a journal there records each finished one, so that an
interrupted conversion can be continued. The manifest is written last, and then the directory is
renamed to ``OUT``: a store exists only when it is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts.files import HeaderError
from experts.layer_file import layer_file_name, layer_record, write_layer
from experts.manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    TOWERS_NAME,
    TRUNK_NAME,
    VERSION,
    Manifest,
    MoELayerRecord,
    is_store,
    write_manifest,
)
from experts.safetensors_io import (
    Entry,
    FileRecord,
    contained,
    read_record,
    sync_directory,
    write_bytes,
    write_file,
)
from experts.weights import quantize_experts
from kernels import ExpertWeights, QuantizedExperts
from kernels.reference import AnyExperts
from moe.commands.convert.bit_allocation import CALIBRATE_FIRST, BitBudget, allocate_bits
from moe.commands.convert.repair import repair_routers
from moe.errors import CalibrationError, CheckpointError
from moe.images.towers import read_towers
from moe.loading.checkpoint import Checkpoint
from moe.loading.hub import ModelFiles, reach_model, read_config
from moe.loading.load import plan_weights
from moe.loading.meta_model import build_meta_model, has_towers
from moe.loading.mtp import plan_mtp
from moe.loading.progress import Report, reporting, size_text
from moe.loading.quantized import decoding_notices, open_checkpoint
from moe.loading.takeover import Takeover, prefixes_of, quantizes
from moe.network.adopt import check_experts
from moe.network.seam import experts_modules, take_weights
from moe.settings import ModelSettings

COPIED = (
    *("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt", "*.tiktoken"),
    *("LICENSE*", "NOTICE*", "README.md"),
)
"""Configuration, tokenizer, chat templates, licence, card."""
NOT_COPIED = ("*.safetensors.index.json", MANIFEST_NAME)
CALIBRATED = "a calibration says nothing about its experts"
PRECISION_KEYS = ("expert_bits", "trunk_bits", "head_bits")


def convert(
    model: str | Path,
    out: str | Path,
    settings: ModelSettings,
    *,
    calibration: Path | None = None,
    budget: BitBudget | None = None,
    repair: bool = False,
    progress: bool | Report = False,
    on_notice: Callable[[str], object] = lambda _: None,
) -> Path:
    """Convert a checkpoint to a store; returns its directory. Continues an interrupted conversion.

    Args:
        model: directory, GGUF file or hub id. A model of a hub that is not in its cache is read
            from there while it is converted, and is never on disk.
        out: directory of the store; must not exist.
        settings: bits and group size; bits of null are 8.
        calibration: folder of a calibration with ``compression``; experts are then quantised with
            error compensation.
        budget: size limit of the experts, instead of ``expert_bits``; needs a calibration.
        repair: see `moe.commands.convert.repair`; needs a calibration, and loads the store.
        progress, on_notice: see `moe.loading.progress.reporting`; called with notices.

    Raises:
        CheckpointError: the model cannot be read, `out` exists, or the disk is full or fails.
        CalibrationError: the calibration is missing or another model's, or the budget impossible.
        UnsupportedModelError: the architecture is unknown or has no experts that we can convert.
        KeyboardInterrupt: the message says what is kept.
    """
    target = Path(out).expanduser()
    if target.exists():
        raise CheckpointError(f"{target} exists already; remove it or choose another name")
    if repair and calibration is None:
        raise CalibrationError("repairing routers needs a calibration: " + CALIBRATE_FIRST)
    work = target.with_name(f"{target.name}.unfinished")
    try:
        with reach_model(model, whole=True) as source, reporting(progress) as report:
            if is_store(source.path):
                raise CheckpointError(
                    f"{source.path} is a store already; convert the original checkpoint"
                )
            conversion = _Conversion(source, work, settings, report, calibration, budget)
            work.mkdir(parents=True, exist_ok=True)
            conversion.run(calibration if repair else None, on_notice)
        work.rename(target)
        (target / JOURNAL_NAME).unlink()
        sync_directory(target.parent)
    except HeaderError as error:
        raise CheckpointError(f"a file of {model} {error}") from error
    except OSError as error:
        what = f"cannot write {error.filename or work}: {error.strerror or error}"
        raise CheckpointError(what + _what_is_kept(work)) from error
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(_what_is_kept(work)) from stop
    return target


def _what_is_kept(work: Path) -> str:
    if not (work / JOURNAL_NAME).exists():
        return ""
    return f"; finished files are kept in {work}, and the same command continues from there"


class _Conversion:
    """One run: converts the layers of `source` that `work` lacks, and completes the store."""

    def __init__(
        self,
        source: ModelFiles,
        work: Path,
        settings: ModelSettings,
        report: Report,
        calibration: Path | None,
        budget: BitBudget | None,
    ) -> None:
        self._source, self._work, self._report = source.path, work, report
        self._bytes = source.source
        bits = {key: getattr(settings, key) or 8 for key in PRECISION_KEYS}
        self._settings = settings.model_copy(update=bits)
        self._config = read_config(source.path)
        self._network = build_meta_model(self._config)
        check_experts(self._network)
        unwanted = CALIBRATED if calibration is not None or budget is not None else ""
        with open_checkpoint(source.path, self._config, source=self._bytes) as checkpoint:
            self._mtp = plan_mtp(self._network, checkpoint.tensors, unwanted)
        self._towers: dict[str, FileRecord] = {}
        self._names = [name for name, _ in experts_modules(self._network)]
        self._allocation = allocate_bits(self._network, self._settings, calibration, budget)
        if self._allocation is not None:
            most = {"expert_bits": self._allocation.most}
            self._settings = self._settings.model_copy(update=most)

    def run(self, repair_by: Path | None, on_notice: Callable[[str], object]) -> None:
        for notice in decoding_notices(self._config, self._settings.expert_bits):
            on_notice(notice)
        if self._mtp.why_not and self._mtp.renamed:
            on_notice(f"the store has no multi-token-prediction layer: {self._mtp.why_not}")
        exact = quantizes(self._settings.expert_bits) or quantizes(self._settings.trunk_bits)
        with open_checkpoint(
            self._source, self._config, exact=exact, source=self._bytes
        ) as checkpoint:
            job = {
                "version": VERSION,
                "settings": {key: getattr(self._settings, key) for key in PRECISION_KEYS},
                "group_size": self._settings.group_size,
                "allotment": self._allocation and self._allocation.digest,
                "files": checkpoint.fingerprint(),
            }
            with Journal(self._work, job) as self._journal:
                self._convert(checkpoint)
                self._write_towers(checkpoint, on_notice)
                self._complete()
                if repair_by is not None:
                    repair_routers(self._network, self._work, repair_by, on_notice)
                    self._complete()

    def _write_towers(self, checkpoint: Checkpoint, on_notice: Callable[[str], object]) -> None:
        """Write what reads images of a multimodal model, as it is stored."""
        if not has_towers(self._network):
            return
        towers = read_towers(self._network, checkpoint)
        if isinstance(towers, str):
            on_notice(towers)
        else:
            self._towers = {TOWERS_NAME: write_trunk(towers, self._work / TOWERS_NAME)}

    def _complete(self) -> None:
        """Write everything except experts, and the manifest."""
        trunk = write_trunk(self._network, self._work / TRUNK_NAME)
        copy_files(self._source, self._work)
        finished = [
            self._journal.finished[layer_file_name(index)] for index in range(len(self._names))
        ]
        manifest = Manifest(
            source=self._source.name,
            bits=self._settings.expert_bits or 8,
            group_size=self._settings.group_size,
            linears=prefixes_of(self._network),
            layers=tuple(layer for layer, _ in finished),
            files={layer.file: file for layer, file in finished}
            | {TRUNK_NAME: trunk}
            | self._towers,
        )
        write_manifest(self._work, manifest)

    def _convert(self, checkpoint: Checkpoint) -> None:
        """Write the missing layers, and load the trunk into the network."""
        takeover = Takeover(self._network, self._settings, self._write_layer)
        dtype_for = takeover.dtype_for(lambda _, stored: stored)
        weights = plan_weights(self._network, checkpoint, dtype_for, renamed=self._mtp.renamed)
        there = {
            name
            for index, name in enumerate(self._names)
            if layer_file_name(index) in self._journal.finished
        }
        sizes = takeover.nbytes(weights.nbytes)
        owned = tuple(f"{name}." for name in there)
        needed = sum(size for name, size in sizes.items() if not name.startswith(owned))
        free = shutil.disk_usage(self._work).free
        if needed > free:
            raise CheckpointError(
                f"the store needs {size_text(needed).strip()} more, and {self._work.parent} has "
                f"{size_text(free).strip()} free; make room, or convert at fewer bits"
            )
        weights = weights.without(there, checkpoint)
        for name in there:
            take_weights(self._network.get_submodule(name))
        takeover.load(
            checkpoint,
            weights,
            torch.device("cpu"),
            lambda now: self._report(replace(now, phase="converting")),
        )

    def _write_layer(self, index: int, whole: AnyExperts) -> None:
        assert isinstance(whole, ExpertWeights)
        bits = self._settings.expert_bits
        experts: AnyExperts = whole
        bits_E = None if self._allocation is None else self._allocation.stored_bits(index)
        if self._allocation is not None:
            experts = self._allocation.quantize(index, whole, self._settings.group_size)
        elif bits is not None and quantizes(bits):
            experts = quantize_experts(whole, self._settings.group_size, bits)
        interleaved = isinstance(experts, QuantizedExperts) and experts.interleaved
        layer = layer_record(index, self._names[index], whole, interleaved, bits_E)
        self._journal.add(layer, write_layer(self._work, index, layer, experts))


class Journal:
    """A text file in the working directory: a line for the job, then one for each finished file.

    The lines and files of another job (another model, other settings) are removed. A file counts
    as finished only while its content has the recorded checksum.

    Attributes:
        finished: file name -> its layer and its record.

    Raises:
        CheckpointError: another process is converting into this directory.
        OSError: the directory cannot be read or written.
    """

    def __init__(self, directory: Path, job: dict[str, Any]) -> None:
        self._directory = directory
        self._path = directory / JOURNAL_NAME
        self._file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise CheckpointError(
                f"another process is converting into {directory}; wait for it, or stop it"
            ) from error
        self.finished: dict[str, tuple[MoELayerRecord, FileRecord]] = {}
        for file in directory.glob("*.unfinished"):  # of a process that was killed
            file.unlink(missing_ok=True)
        lines, end = self._lines()
        if lines[:1] == [job]:
            for line in lines[1:]:
                self._recall(line)
            self._file.truncate(end)
        else:
            for file in (*directory.glob("*.safetensors"), directory / MANIFEST_NAME):
                file.unlink(missing_ok=True)
            self._file.truncate(0)
            self._append(job)

    def add(self, layer: MoELayerRecord, record: FileRecord) -> None:
        """Record that the file of `layer` is complete and on disk."""
        self.finished[layer.file] = layer, record
        self._append({"layer": layer.model_dump(), "file": record.model_dump()})

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _append(self, content: object) -> None:
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lines(self) -> tuple[list[Any], int]:
        """The complete lines, and their bytes; a killed process may have left half a line."""
        found, end = [], 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                found.append(json.loads(line))
            except ValueError:
                break
            end += len(line)
        return found, end

    def _recall(self, line: Any) -> None:
        try:
            layer = MoELayerRecord.model_validate_json(json.dumps(line["layer"]))
            record = FileRecord.model_validate_json(json.dumps(line["file"]))
            fd = os.open(self._directory / layer.file, os.O_RDONLY | os.O_CLOEXEC)
        except (ValueError, KeyError, TypeError, OSError):
            return
        try:
            if record.is_of(read_record(fd)):
                self.finished[layer.file] = layer, record
        except ValueError:
            return
        finally:
            os.close(fd)


def copy_files(source: Path, target: Path) -> None:
    """Copy `COPIED`. Raises OSError; links out of the directory raise `HeaderError`."""
    files = (file for pattern in COPIED for file in source.glob(pattern) if file.is_file())
    for name in sorted({str(file.relative_to(source)) for file in files}):
        if not any(fnmatch(name, pattern) for pattern in NOT_COPIED):
            content = contained(source, name).read_bytes()
            if name == "config.json":
                content = _without_quantization(content)
            (target / name).parent.mkdir(exist_ok=True)
            write_bytes(target / name, content)


def _without_quantization(config: bytes) -> bytes:
    """config.json without its description of the checkpoint's own quantisation."""
    content = json.loads(config)
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    if not any("quantization_config" in part for part in parts):
        return config
    for part in parts:
        part.pop("quantization_config", None)
    return json.dumps(content, indent=2).encode()


def write_trunk(network: nn.Module, path: Path) -> FileRecord:
    """Write a network without its experts to one file; tied tensors once. Raises OSError."""
    state = network.state_dict()
    first: dict[object, str] = {}
    for name, tensor in state.items():
        first.setdefault((tensor.data_ptr(), tensor.shape) if tensor.numel() else name, name)
    names = sorted(first.values(), key=lambda name: -state[name].itemsize)
    entries = [Entry(name, state[name].dtype, tuple(state[name].shape)) for name in names]
    return write_file(path, entries, (state[name] for name in names))
