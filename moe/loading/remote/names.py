"""Names of models on a hub, and which files of a repository a name means.

``org/name`` means the safetensors of a repository, or its only GGUF file. ``org/name:QUANT`` means
one of its GGUF files by the quantisation in the file's name; ``@REVISION`` (a branch, tag or
commit) follows either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from moe.errors import CheckpointError
from moe.loading.progress import size_text

_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(
    rf"({_PART}/{_PART})(?::([A-Za-z0-9][\w.-]{{0,63}}))?(?:@([\w][\w./-]{{0,199}}))?", re.ASCII
)
# How llama.cpp and those who publish for it write a quantisation at the end of a file's name
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d|TQ\d|MXFP4|NVFP4|BF16|F16|F32|FP16|FP32)(?:_[A-Z0-9]+)*)$",
    re.IGNORECASE,
)
_BESIDE = ("mmproj", "imatrix")  # GGUF files that are no language model

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Names of the parts of one GGUF file."""
PATTERNS = (
    *("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"),
    *("LICENSE*", "NOTICE*", "README.md"),
)
"""Files that are downloaded of safetensors repositories: never pickles (``*.bin``, ``*.pt``)."""
COPIES = ("original/*", "consolidated*", "onnx/*", "openvino/*")
"""The same weights again, in layouts of their authors (gpt-oss, Mistral, Llama) or of others."""


@dataclass(frozen=True)
class HubName:
    """A model on a hub.

    Attributes:
        repository: ``org/name``.
        quant: which of its GGUF files; empty for safetensors or the only one.
        revision: branch, tag or commit; None for the repository's default.
    """

    repository: str
    quant: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """The name that `text` spells; None if it cannot be one."""
        found = _NAME.fullmatch(text)
        if found is None or ".." in text or "--" in found[1]:
            return None
        return cls(found[1], found[2] or "", found[3])

    @property
    def public(self) -> str:
        """Clients' name of the model: the name without its revision."""
        return f"{self.repository}:{self.quant}" if self.quant else self.repository

    def __str__(self) -> str:
        return self.public if self.revision is None else f"{self.public}@{self.revision}"


def at_revision(model: str, revision: str | None) -> str:
    """A name that a user typed, at the revision that an option names.

    Raises `CheckpointError` where there is no such thing.
    """
    name = HubName.parse(model)
    if revision is None:
        return model
    if name is None or name.revision is not None:
        what = "is no hub id" if name is None else f"names revision {name.revision} itself"
        raise CheckpointError(f"--revision {revision} was given, and {model} {what}; leave one out")
    if HubName.parse(made := str(replace(name, revision=revision))) is None:
        raise CheckpointError(
            f"--revision {revision!r} is no name of a branch, tag or commit; check the spelling"
        )
    return made


@dataclass(frozen=True)
class ChosenFiles:
    """Files of a repository, by size.

    Attributes:
        weights: the safetensors, or the parts of a GGUF file, in order.
        others: configuration, tokenizer, licence; empty for GGUF, which has its own.
        gguf: whether the weights are GGUF.
    """

    weights: Mapping[str, int]
    others: Mapping[str, int]
    gguf: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.weights.values()) + sum(self.others.values())


def choose_files(name: HubName, sizes: Mapping[str, int]) -> ChosenFiles:
    """Which files of a repository a name means.

    Args:
        sizes: of all its files.

    Raises:
        CheckpointError: it has none that can be read, or several; says which.
    """
    wanted = {file: size for file, size in sizes.items() if _is_wanted(file)}
    weights = {
        file: size
        for file, size in wanted.items()
        if file.endswith(".safetensors") and "/" not in file  # a calibration has some, too
    }
    quants = gguf_files(sizes)
    if name.quant or (quants and not weights):
        return _choose_gguf(name, quants, bool(weights), sizes)
    if not weights:
        raise CheckpointError(f"{name} has no weights that can be read: {_found(sizes)}")
    return ChosenFiles(
        weights, {file: size for file, size in wanted.items() if file not in weights}
    )


def _is_wanted(file: str) -> bool:
    return any(fnmatch(file, p) for p in PATTERNS) and not any(fnmatch(file, p) for p in COPIES)


def gguf_files(files: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among `files` by their quantisation: the parts of each, in order.

    Two of one quantisation are told apart by their whole names.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        last = file.rpartition("/")[2].lower()
        if last.endswith(".gguf") and not any(word in last for word in _BESIDE):
            split = SPLIT.fullmatch(file)
            models.setdefault(split[1] if split else file.removesuffix(".gguf"), []).append(file)
    labels: dict[str, list[str]] = {}
    for stem in models:
        found = _QUANT.search(stem)
        labels.setdefault(found[1].upper() if found else stem.rpartition("/")[2], []).append(stem)
    return {
        label if len(stems) == 1 else stem.rpartition("/")[2]: models[stem]
        for label, stems in labels.items()
        for stem in stems
    }


def _choose_gguf(
    name: HubName, quants: Mapping[str, list[str]], safetensors: bool, sizes: Mapping[str, int]
) -> ChosenFiles:
    def size_of(label: str) -> int:
        return sum(sizes[file] for file in quants[label])

    if not quants:
        raise CheckpointError(
            f"{name} has no GGUF files, so there is no {name.quant}: {_found(sizes)}"
            + ("; leave out the part after the colon" if safetensors else "")
        )
    given = name.quant.upper()
    found = [label for label in quants if label.upper() == given] if given else list(quants)
    if len(found) != 1:
        listed = "\n".join(
            f"  {name.repository}:{label:<16} {size_text(size_of(label)).strip()}"
            for label in sorted(quants, key=size_of)
        )
        why = f"has no {name.quant}" if name.quant else "has several GGUF files"
        raise CheckpointError(f"{name.repository} {why}; name one of them:\n{listed}")
    return ChosenFiles({file: sizes[file] for file in quants[found[0]]}, {}, gguf=True)


def _found(sizes: Mapping[str, int]) -> str:
    pickles = [file for file in sizes if file.endswith(PICKLE_SUFFIXES)]
    if any(file.endswith(".safetensors") for file in sizes):
        return "it has safetensors"
    if pickles:
        return (
            f"only pickles ({', '.join(pickles[:5])}), which can run code when opened and are "
            "never read here; look for a copy as safetensors"
        )
    return f"it has {', '.join(sorted(sizes)[:8]) or 'no files'}"
