"""Text for the demo model: three domains, a held-out split and a byte-level BPE tokenizer.

What: collects permissively licensed text that any Debian/Python machine can install (Python's
documentation sources, the standard library, the C++ headers of the torch wheel), keeps about
200 kB per domain apart as held-out text, trains the tokenizer and serves training windows.
Why: a small real model needs real text, and a held-out number is honest only if nearly the same
text is not in the training set; so files are split whole and near-duplicates are dropped.
How: imported by ``train_demo.py``; the held-out files live in ``tests/data/``.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, IM_START, IM_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
DOMAINS = {  # name: (what it is, licence)
    "prose": ("Python documentation, reStructuredText sources", "PSF-2.0 (examples also 0BSD)"),
    "python": ("Python standard library source", "PSF-2.0"),
    "cpp": ("C++ headers installed by the torch wheel", "BSD-3-Clause"),
}
HELDOUT_BYTES = 200_000  # per domain, at least
MAX_HELDOUT_FILE = 60_000  # so that a domain's held-out text is several files
MIN_FILE = 500  # shorter files are include lists and stubs
NEAR_DUPLICATE = 0.25  # share of a file's distinct long lines that other files already hold
LONG_LINE = 25  # characters; shorter lines repeat by chance

PYTHON_SKIP = re.compile(r"test|idlelib|encodings|site-packages|dist-packages|pydoc_data|__phello")
CPP_DIRS = ("ATen", "c10", "torch", "caffe2", "google", "pybind11")
CPP_SKIP = re.compile(  # generated code, and variants of one file for several instruction sets
    r"ATen/ops/|generated|\.pb\.h$|ATen/cpu/vec/|mem_eff_attention|Registration|TensorBody"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def docs_root(cache: Path) -> Path:
    """Find the documentation sources, fetching Debian's package without root if need be."""
    pattern = "usr/share/doc/python3*/html/_sources"
    for base in (Path("/"), cache):
        if found := sorted(base.glob(pattern)):
            return found[-1]
    cache.mkdir(parents=True, exist_ok=True)
    depends = subprocess.check_output(["apt-cache", "depends", "python3-doc"], text=True)
    package = re.search(r"python3\.\d+-doc", depends)
    if package is None:
        raise SystemExit("no Python documentation found; install Debian's python3-doc")
    subprocess.run(["apt-get", "download", package[0]], cwd=cache, check=True)
    subprocess.run(["dpkg", "-x", next(cache.glob("python3*.deb")), cache], check=True)
    return sorted(cache.glob(pattern))[-1]


def domain_files(domain: str, cache: Path) -> Iterator[tuple[str, Path]]:
    """Yield (stable relative name, path) of every candidate file of one domain."""
    if domain == "prose":
        root = docs_root(cache)
        paths = root.rglob("*.rst.txt")
    elif domain == "python":
        root = Path(sysconfig.get_path("stdlib"))
        paths = (p for p in root.rglob("*.py") if not PYTHON_SKIP.search(str(p.relative_to(root))))
    else:
        root = Path(torch.__file__).parent / "include"
        headers = (p for top in CPP_DIRS for p in (root / top).rglob("*.h"))
        paths = (p for p in headers if not CPP_SKIP.search(str(p.relative_to(root))))
    for path in paths:
        yield path.relative_to(root).as_posix(), path


def long_lines(text: str) -> set[int]:
    """Return hashes of the distinct lines that are long enough to betray a copied text."""
    return {hash(s) for line in text.splitlines() if len(s := line.strip()) >= LONG_LINE}


def read_domain(domain: str, cache: Path) -> list[str]:
    """Read one domain's files in an order that depends only on their names."""
    files = sorted(
        domain_files(domain, cache), key=lambda f: hashlib.sha256(f[0].encode()).digest()
    )
    texts = (path.read_text("utf-8", errors="ignore") for _, path in files)
    return [t for t in texts if len(t) >= MIN_FILE and "generated" not in t[:400].lower()]


def drop_near_duplicates(texts: list[str], seen: set[int]) -> Iterator[str]:
    """Yield the texts most of whose long lines are not in ``seen``, which grows with each."""
    for text in texts:
        lines = long_lines(text)
        if lines and len(lines & seen) <= NEAR_DUPLICATE * len(lines):
            seen |= lines
            yield text


def heldout_text(domain: str, texts: list[str], path: Path) -> str:
    """Return the held-out text in ``path``; where there is none yet, choose and write it."""
    if not path.exists():
        chosen, size = [], 0
        small = [t for t in texts if len(t.encode()) <= MAX_HELDOUT_FILE]
        for text in drop_near_duplicates(small, set()):
            chosen.append(text.rstrip("\n") + "\n")
            size += len(chosen[-1].encode())
            if size >= HELDOUT_BYTES:
                break
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes("\n".join(chosen).encode())
    return path.read_bytes().decode()


def load_text(cache: Path, heldout_dir: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return training texts (a list of files) and held-out text (one string) by domain."""
    train, heldout = {}, {}
    for domain in DOMAINS:
        texts = read_domain(domain, cache)
        heldout[domain] = heldout_text(domain, texts, heldout_dir / f"heldout_{domain}.txt")
        # The held-out files are in `texts` too; they are near-duplicates of themselves.
        train[domain] = list(drop_near_duplicates(texts, long_lines(heldout[domain])))
    return train, heldout


def overlap(heldout: str, train: list[str]) -> float:
    """Share of the held-out text's distinct long lines that the training text holds verbatim."""
    lines = long_lines(heldout)
    return len(lines & set().union(*map(long_lines, train))) / len(lines)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; it round-trips any text and adds no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[IM_START, IM_END],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Concatenate the texts' tokens, each text ended by ``<|endoftext|>``."""
    rows = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    end = tokenizer.eos_token_id
    return torch.tensor([i for row in rows for i in (*row.ids, end)], dtype=torch.int32)


@dataclass(frozen=True)
class Corpus:
    """Tokenizer, token streams and sizes; the dictionaries have one entry per domain."""

    tokenizer: PreTrainedTokenizerFast
    train: dict[str, torch.Tensor]
    heldout: dict[str, torch.Tensor]
    stats: dict[str, dict[str, float]]


def build_corpus(work: Path, heldout_dir: Path, vocab_size: int, quick: bool) -> None:
    """Collect text, tokenize it and write it to ``work``; ``quick`` takes little of it."""
    if quick:
        paths = {d: heldout_dir / f"heldout_{d}.txt" for d in DOMAINS}
        heldout = {d: path.read_text("utf-8")[:20_000] for d, path in paths.items()}
        train = {d: [text] for d, text in heldout.items()}
    else:
        train, heldout = load_text(work / "deb", heldout_dir)
    tokenizer = train_tokenizer((t for texts in train.values() for t in texts), vocab_size)
    tokenizer.save_pretrained(work / "tokenizer")
    stats = {
        d: {
            "files": len(train[d]),
            "bytes": sum(len(t.encode()) for t in train[d]),
            "heldout_bytes": len(heldout[d].encode()),
            "copied_lines": overlap(heldout[d], train[d]),
        }
        for d in DOMAINS
    }
    (work / "stats.json").write_text(json.dumps(stats, indent=2))
    streams = {f"train.{d}": encode(tokenizer, train[d]) for d in DOMAINS}
    streams |= {f"heldout.{d}": encode(tokenizer, [heldout[d]]) for d in DOMAINS}
    save_file(streams, work / "tokens.safetensors")


def load_corpus(work: Path, heldout_dir: Path, vocab_size: int, quick: bool) -> Corpus:
    """Return the corpus in ``work``, building it the first time so that a resumed run sees it."""
    if not (work / "tokens.safetensors").exists():
        build_corpus(work, heldout_dir, vocab_size, quick)
    streams = load_file(work / "tokens.safetensors")
    return Corpus(
        tokenizer=PreTrainedTokenizerFast.from_pretrained(work / "tokenizer"),
        train={d: streams[f"train.{d}"] for d in DOMAINS},
        heldout={d: streams[f"heldout.{d}"] for d in DOMAINS},
        stats=json.loads((work / "stats.json").read_text()),
    )


def training_batch(
    streams: list[torch.Tensor], length: int, size: int, step: int, seed: int
) -> torch.Tensor:
    """Return the ``size`` windows of one training step, [window, token].

    The domains take turns, and each pass over a domain cuts it at a new offset, in a new order.
    The batch is a function of the arguments alone, so a resumed run sees what an uninterrupted
    one would have seen.
    """
    windows = []
    for i in range(step * size, (step + 1) * size):
        turn, domain = divmod(i, len(streams))
        per_epoch = len(streams[domain]) // length - 1  # leaves room for the offset
        epoch, k = divmod(turn, per_epoch)
        rng = torch.Generator().manual_seed(seed + 1_000 * epoch + domain)
        offset = int(torch.randint(length, (1,), generator=rng))
        order = torch.randperm(per_epoch, generator=rng)
        start = int(order[k]) * length + offset
        windows.append(streams[domain][start : start + length])
    return torch.stack(windows).long()
