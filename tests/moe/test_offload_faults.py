"""Disks that are slow, that fail, and files that change: only those suffer who need the bytes.

The faults that offload must survive, and where each is tested:

==== ==============================================================================================
E7   `tests/offload/test_experts.py`: any life of a cache gives the same bits; `test_host`: of two
E8   `tests/offload/test_experts.py`: fewer slots than a row asks for; `test_offload`: refused
E9   `tests/moe/plan/test_memory.py`: what there is; `tests/offload/test_host.py`: page-locked
E10  here: errors; `tests/offload/test_transfer.py`, `test_transfer_native.py`: reads that hang
A16  here: replaced, and rewritten in place
A17  here: the hot set; `tests/moe/convert/test_convert.py`; `tests/moe/loading/test_read_errors.py`
==== ==============================================================================================
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file

from experts.layer_file import layer_entries
from experts.manifest import Bits, read_manifest, write_manifest
from experts.safetensors_io import write_file
from moe import MoE, SamplingParams, loader
from moe.commands.convert.convert import convert
from moe.errors import CheckpointError, ProfileError
from moe.loading.memory_plan import GIB
from moe.settings import ModelSettings
from offload.capacity import fixed_bytes, slot_bytes
from offload.errors import OffloadError
from offload.transfer import Read, Reader, Transfer
from tests.open_files import num_open

SMALL: dict[str, Any] = {
    "memory": {"kv_tokens": 1024, "reserve_gib": 0.0},
    "prefill": {"wave_tokens": 128},
    "engine": {"max_batch_size": 8},
    "offload": {"hot_set": False},
}
PROMPTS = [[20, 7], [5], [90, 11], [64], [33, 2]]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def resident(store: Path) -> MoE:
    return MoE.from_pretrained(store, SMALL)


@pytest.fixture
def offloaded(store: Path, resident: MoE) -> MoE:
    return open_offloaded(store, resident)


def open_offloaded(
    store: Path, resident: MoE, mode: str = "auto", hot_set: bool = False, check: bool = False
) -> MoE:
    """A quarter of the experts in memory."""
    rest = sum(line.bytes for line in resident.memory_plan.lines if line.name != "experts")
    manifest = read_manifest(store)
    room = 8 * slot_bytes(manifest, manifest.bits) + fixed_bytes(manifest) + 16
    memory = SMALL["memory"] | {"device_gib": (rest + room) / GIB}
    prefill = SMALL["prefill"] | {"mode": mode, "group_tokens": 8}
    changes = {"memory": memory, "prefill": prefill, "offload": {"hot_set": hot_set}}
    changes["model"] = {"check_finite": check}
    model = MoE.from_pretrained(store, SMALL | changes)
    assert model.memory_plan.expert_slots == 8
    return model


def test_a_load_that_fails_behind_the_experts_leaves_no_file_open(
    store: Path, resident: MoE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        assert num_open(own) > 0
        raise ProfileError("too late")

    own = Path(shutil.copytree(store, tmp_path / "store"))
    monkeypatch.setattr(loader, "enable_policies", fail)
    with pytest.raises(ProfileError, match="too late"):
        open_offloaded(own, resident)
    gc.collect()
    assert num_open(own) == 0


def test_an_expert_whose_bytes_have_changed_answers_nobody(
    store: Path, resident: MoE, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(store, tmp_path / "store"))
    file = sorted(own.glob("experts-*"))[0]
    content = bytearray(file.read_bytes())
    for place in range(len(content) // 4, len(content), 501):  # in every expert
        content[place] ^= 1
    file.write_bytes(content)
    with open_offloaded(own, resident) as model, pytest.raises(OffloadError, match="is damaged"):
        model.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("architecture", "bits", "part"),
    [
        ("qwen3_moe", 8, "experts.{}.scales"),
        ("qwen3_moe", 16, "experts.{}.whole"),
        ("gpt_oss", 8, "down_bias"),
    ],
)
def test_experts_on_disk_that_are_not_finite_are_named_if_asked(
    architecture: str,
    bits: Bits,
    part: str,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    settings = ModelSettings(expert_bits=bits, group_size=32)
    store = convert(tiny_checkpoint(architecture), tmp_path / "store", settings)
    manifest = read_manifest(store)
    layer = manifest.layers[1]
    tensors = load_file(store / layer.file)
    for expert in range(layer.experts):
        tensors[f"layers.1.{part.format(expert)}"].view(-1)[-1] = float("nan")
    entries = layer_entries(1, layer, bits, manifest.group_size)
    written = write_file(store / layer.file, entries, [tensors[entry.name] for entry in entries])
    files = manifest.files | {layer.file: written}
    write_manifest(store, manifest.model_copy(update={"files": files}))
    resident = MoE.from_pretrained(store, SMALL)
    open_offloaded(store, resident).close()
    named = rf"of {layer.module} in .*{layer.file} holds NaN or infinity"
    with (
        pytest.raises((CheckpointError, OffloadError), match=named),
        open_offloaded(store, resident, check=True) as model,
    ):
        model.generate(PROMPTS, GREEDY)


class Meddling:
    """A reader whose transfers are changed by `change` before anybody sees them."""

    def __init__(self, reader: Reader, change: Callable[[Transfer, str], Transfer]) -> None:
        self.reader, self.change = reader, change
        self.name, self.reason = reader.name, reader.reason

    def submit(self, reads: Sequence[Read], *, urgent: bool, what: str = "") -> Transfer:
        return self.change(self.reader.submit(reads, urgent=urgent, what=what), what)

    def close(self) -> None:
        self.reader.close()


@contextmanager
def meddling(model: MoE, change: Callable[[Transfer, str], Transfer]) -> Iterator[None]:
    parts = model._loaded.offloaded
    assert parts is not None
    source: Any = parts.cache._manager._source
    reader, source._reader = source._reader, Meddling(source._reader, change)
    yield
    parts.cache._manager.settle_unpinned()  # else a later request may wait for such a read
    source._reader = reader


class Slow:
    """A transfer that ends some time after it began at the earliest."""

    def __init__(self, transfer: Transfer, seconds: float = 0.0) -> None:
        self._transfer, self._ready = transfer, time.perf_counter() + seconds

    @property
    def done(self) -> bool:
        return time.perf_counter() >= self._ready and self._transfer.done

    @property
    def failed(self) -> Exception | None:
        return self._transfer.failed

    def wait(self) -> float:
        begun = time.perf_counter()
        time.sleep(max(0.0, self._ready - begun))
        self._transfer.wait()
        return time.perf_counter() - begun

    def cancel(self) -> bool:
        return self._transfer.cancel()

    def hasten(self) -> None:
        self._transfer.hasten()


class Broken(Slow):
    """A transfer that fails in the end; until then its bytes still come."""

    def __init__(self, transfer: Transfer, what: str) -> None:
        super().__init__(transfer)
        self._failure = OffloadError(f"cannot read {what}: Input/output error")

    @property
    def failed(self) -> Exception | None:
        return self._failure if self.done else None

    def wait(self) -> float:
        self._transfer.wait()
        raise self._failure


def outcomes(model: MoE, prompts: Sequence[list[int]]) -> list[list[int] | Exception]:
    """Tokens of prompts that run together, or what ended them."""
    engine = model.engine()
    groups = [model.request(prompt, GREEDY) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    ended: dict[Any, Exception] = {}
    while not engine.idle:
        ended |= {s: o for s, o in engine.step() if isinstance(o, Exception)}
    sequences = [group.sequences[0] for group in groups]
    return [ended.get(sequence, sequence.token_ids) for sequence in sequences]


def experts_of(model: MoE, prompt: list[int]) -> set[tuple[int, int]]:
    """(layer, expert) that a prompt and its continuation need."""
    model.reset_stats()
    model.generate(prompt, GREEDY)
    return {
        (layer["layer"], expert)
        for layer in model.stats()["layers"]
        for expert, tokens in enumerate(layer["tokens_per_expert"])
        if tokens
    }


def test_slow_reads_in_any_order_change_nothing(offloaded: MoE, resident: MoE) -> None:
    random = Random(0)

    def delay(transfer: Transfer, _: str) -> Transfer:
        return Slow(transfer, random.choice((0.0, 0.001)))

    with meddling(offloaded, delay):
        assert outcomes(offloaded, PROMPTS) == outcomes(resident, PROMPTS)


@pytest.mark.parametrize("mode", ["whole", "layered"])
def test_a_read_error_ends_those_who_need_the_expert_and_nobody_else(
    store: Path, resident: MoE, mode: str
) -> None:
    offloaded = open_offloaded(store, resident, mode)
    needed = [experts_of(resident, prompt) for prompt in PROMPTS]
    candidates = {key for keys in needed for key in keys}
    layer, expert = next(
        key for key in sorted(candidates) if 0 < sum(key in keys for keys in needed) < len(needed)
    )
    bad = f"expert {expert} of MoE layer {layer}"
    with meddling(offloaded, lambda t, what: Broken(t, what) if what == bad else t):
        seen = outcomes(offloaded, PROMPTS)
    expected = outcomes(resident, PROMPTS)
    for keys, found, right in zip(needed, seen, expected, strict=True):
        if (layer, expert) in keys:
            assert isinstance(found, OffloadError)
            assert str(found) == f"cannot read {bad}: Input/output error"
        else:
            assert found == right
    assert outcomes(offloaded, PROMPTS) == expected
    assert offloaded.stats()["offload"]["failures"] > 0


def test_generate_raises_and_goes_on_afterwards(offloaded: MoE, resident: MoE) -> None:
    with meddling(offloaded, lambda t, what: Broken(t, what)):
        with pytest.raises(OffloadError, match="cannot read expert"):
            offloaded.generate(PROMPTS[0], GREEDY)
        with pytest.raises(OffloadError, match="cannot read expert"):
            offloaded.logits(PROMPTS[0])
    assert outcomes(offloaded, PROMPTS[:1]) == outcomes(resident, PROMPTS[:1])


def test_a_store_replaced_under_us_is_still_the_one_that_was_opened(
    store: Path, resident: MoE, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    model = open_offloaded(copy, resident)
    for file in copy.glob("experts-*.safetensors"):
        size = file.stat().st_size
        (tmp_path / "new").write_bytes(os.urandom(size))
        (tmp_path / "new").replace(file)
    assert outcomes(model, PROMPTS) == outcomes(resident, PROMPTS)


@pytest.mark.parametrize("size", [1000, None])
def test_a_file_rewritten_in_place_is_an_error_and_never_an_answer(
    store: Path, resident: MoE, tmp_path: Path, size: int | None
) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    model = open_offloaded(copy, resident)
    for file in copy.glob("experts-*.safetensors"):
        before = file.stat()
        with file.open("r+b") as content:
            content.truncate(size or before.st_size)
            content.write(b"\0" * 100)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    for outcome in outcomes(model, PROMPTS):
        assert isinstance(outcome, OffloadError)
        assert "experts-0000" in str(outcome)


def test_a_full_disk_costs_the_hot_set_and_nothing_else(
    store: Path, resident: MoE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    model = open_offloaded(copy, resident, hot_set=True)
    before = sorted(copy.iterdir())
    assert outcomes(model, PROMPTS) == outcomes(resident, PROMPTS)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("experts.safetensors_io.os.fsync", full)
        model.close()
    assert "the hot set was not saved to" in caplog.text
    assert "No space left on device" in caplog.text
    assert sorted(copy.iterdir()) == before
