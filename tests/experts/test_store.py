"""The store: what is written is read, plane by plane; what is damaged is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from experts.layer_file import WHOLE, layer_record, write_layer
from experts.manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    TRUNK_NAME,
    Manifest,
    StoreError,
    read_manifest,
    write_manifest,
)
from experts.safetensors_io import PAGE, Entry, digest_of, write_bytes, write_file
from experts.store import Store
from experts.weights import ExpertKey, from_blobs, quantize_experts
from kernels import ExpertWeights
from kernels.reference import AnyExperts
from tests.experts.expert_cases import on_meta, some_experts
from tests.open_files import num_open

CPU = torch.device("cpu")
WHOLE_LAYERS = [
    some_experts("interleaved", biases=True, dtype=torch.bfloat16, seed=seed) for seed in range(2)
]


def make_store(directory: Path, bits: int = 8) -> Path:
    directory.mkdir(exist_ok=True)
    trunk = write_file(
        directory / TRUNK_NAME, [Entry("norm", torch.float32, (3,))], [torch.ones(3)]
    )
    files, layers = {TRUNK_NAME: trunk}, []
    for index, whole in enumerate(WHOLE_LAYERS):
        experts: AnyExperts = whole if bits == WHOLE else quantize_experts(whole, 32, bits)
        layers.append(layer_record(index, f"layers.{index}.experts", whole, bits < WHOLE))
        files[layers[-1].file] = write_layer(directory, index, layers[-1], experts)
    manifest = {
        "source": "here", "bits": bits, "group_size": 32, "linears": {},
        "layers": tuple(layers), "files": files,
    }  # fmt: skip
    write_manifest(directory, Manifest.model_validate(manifest))
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("made"))


def load(store: Store, bits: int, advance: Callable[[int], object] = lambda _: None) -> list[Any]:
    return [
        store.load_layer(index, bits, on_meta(whole), CPU, advance)
        for index, whole in enumerate(WHOLE_LAYERS)
    ]


def tensors(experts: AnyExperts) -> list[Tensor]:
    if isinstance(experts, ExpertWeights):
        found = [experts.gate_up_EGH, experts.down_EHF]
    else:
        found = [*(plane for planes in experts.planes for plane in planes), *experts.scales]
    biases = (experts.gate_up_bias_EG, experts.down_bias_EH)
    return found + [bias for bias in biases if bias is not None]


def same(mine: AnyExperts, theirs: AnyExperts) -> bool:
    pairs = list(zip(tensors(mine), tensors(theirs), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_any_prefix_is_read_and_nothing_else(made: Path, bits: int) -> None:
    read: list[int] = []
    with Store.open(made) as store:
        layers = load(store, bits, read.append)
        assert sum(read) == store.layer_bytes(bits)
    for mine, whole in zip(layers, WHOLE_LAYERS, strict=True):
        assert same(mine, quantize_experts(whole, 32, bits))
        assert mine.interleaved
        assert mine.activation is whole.activation


def test_whole_weights(tmp_path: Path) -> None:
    with Store.open(make_store(tmp_path, WHOLE)) as store:
        assert all(map(same, load(store, WHOLE), WHOLE_LAYERS))


@pytest.mark.parametrize(
    ("bits", "blobs"),
    [(8, ["scales", "plane0", "plane1", "plane2", "plane3"]), (2, ["scales", "plane0"])],
)
def test_each_blob_can_be_read_alone(tmp_path: Path, bits: int, blobs: list[str]) -> None:
    """By offset, expert by expert from a page on, and by anybody's safetensors reader."""
    quantized = quantize_experts(WHOLE_LAYERS[1], 32, bits)
    with Store.open(make_store(tmp_path, bits)) as store:
        known = load_file(tmp_path / "experts-00001.safetensors")
        position = store.blob(ExpertKey(1, 0), "scales").start
        assert position % PAGE == 0
        for expert in range(3):
            for number, blob in enumerate(blobs):
                info = store.blob(ExpertKey(1, expert), blob)
                assert info.start == position
                position = info.end
                content = info.file.read_bytes()[info.start : info.end]
                owned = (quantized.scales[expert], *quantized.planes[expert])[number]
                assert content == bytes(owned.view(torch.uint8).numpy())
                assert torch.equal(known[f"layers.1.experts.{expert}.{blob}"], owned)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, WHOLE])
def test_one_read_brings_an_expert_at_any_precision(tmp_path: Path, bits: int) -> None:
    """Straight into memory that kernels take; what a finer prefix has more follows it."""
    whole = WHOLE_LAYERS[1]
    with Store.open(make_store(tmp_path, max(bits, 8))) as store:
        shape = store.manifest.layers[1].shape(32)
        file = store.file(1)
        for expert in range(3):
            key = ExpertKey(1, expert)
            place = store.prefix(key, bits)
            memory = torch.frombuffer(
                bytearray(os.pread(file.fd, len(place), place.start)), dtype=torch.uint8
            )
            if bits == WHOLE:
                parts = whole.gate_up_EGH[expert].flatten(), whole.down_EHF[expert].flatten()
                assert torch.equal(memory.view(torch.bfloat16), torch.cat(parts))
                continue
            assert place.start == store.prefix(key, 8).start
            one = from_blobs(shape, *shape.split(memory[None], bits), True, activation=len)
            wanted = quantize_experts(whole, 32, bits)
            pairs = zip(one.planes[0], wanted.planes[expert], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
            assert torch.equal(one.scales[0], wanted.scales[expert])


def test_verify_finds_any_changed_byte(made: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path / "x")
    with Store.open(store) as whole:
        whole.verify()
    file = store / "experts-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with (
        Store.open(store) as damaged,
        pytest.raises(StoreError, match=r"00001\.safetensors: its"),
    ):
        damaged.verify()


@pytest.mark.parametrize("bits", [2, 8, WHOLE])
def test_a_changed_byte_of_an_expert_is_found_when_it_is_read(tmp_path: Path, bits: int) -> None:
    store = make_store(tmp_path / "x", bits=bits)
    with Store.open(store) as whole:
        load(whole, bits)
        place = whole.prefix(ExpertKey(1, 2), bits)
        file = whole.file(1).path
    content = bytearray(file.read_bytes())
    content[place.stop - 3] ^= 4
    file.write_bytes(content)
    with (
        Store.open(store) as damaged,
        pytest.raises(StoreError, match=r"damaged: layers\.1\.experts\.2\.\w+ does not have its"),
    ):
        load(damaged, bits)


def test_a_store_without_checksums_loads(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x")
    manifest = read_manifest(store)
    files = {name: file.model_copy(update={"sums": None}) for name, file in manifest.files.items()}
    write_manifest(store, manifest.model_copy(update={"files": files}))
    with Store.open(store) as old:
        load(old, 8)
        old.verify()


def test_a_prefix_is_checked_as_far_as_it_was_read(tmp_path: Path) -> None:
    with Store.open(make_store(tmp_path / "x")) as store:
        key = ExpertKey(1, 2)
        place = store.prefix(key, 2)
        content = bytearray(store.file(1).path.read_bytes()[place.start : place.stop])
        part = torch.frombuffer(content, dtype=torch.uint8)
        store.check(key, 8, [part[:7], part[7:]])
        part[-1] ^= 1
        with pytest.raises(StoreError, match="damaged"):
            store.check(key, 8, [part])


def test_manifests_whose_numbers_do_not_fit_one_another(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x", bits=4)
    (tmp_path / "y").mkdir()
    lie = rewritten(store, tmp_path / "y", "layers", 0, "bits", value=[4, 8, 4])
    with pytest.raises(StoreError, match="an expert has more bits than the store"):
        Store.open(lie)
    manifest = read_manifest(store)
    files = {
        name: file.model_copy(update={"sums": None if file.sums is None else file.sums[:-1]})
        for name, file in manifest.files.items()
    }
    write_manifest(store, manifest.model_copy(update={"files": files}))
    with (
        Store.open(store) as fewer,
        pytest.raises(StoreError, match=r"has \d+ tensors and \d+ checksums$"),
    ):
        load(fewer, 4)


@given(data=st.data())
def test_random_damage_is_refused_or_harmless(
    made: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Edits and cuts anywhere: an error, or the layers that were written; data only if verified."""
    directory = tmp_path_factory.mktemp("damaged")
    for file in made.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    victim = data.draw(st.sampled_from(sorted(directory.iterdir())))
    content = bytearray(victim.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        end = data.draw(st.sampled_from([8, 300, len(content)]))
        place = data.draw(st.integers(0, min(end, len(content)) - 1))
        content[place] = data.draw(
            st.sampled_from(b'0123456789-{}",:\x00\xff') | st.integers(0, 255)
        )
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    victim.write_bytes(content)
    if data.draw(st.integers(0, 9)) == 0:
        victim.unlink()
    bits = data.draw(st.sampled_from([2, 3, 4, 8]))
    layers, refusal = [], str(directory)
    try:
        with Store.open(directory) as store:
            store.verify()
            layers = load(store, bits)
    except StoreError as error:
        refusal = str(error)
    assert str(directory) in refusal
    assert layers or refusal != str(directory)
    for mine, whole in zip(layers, WHOLE_LAYERS, strict=False):
        assert same(mine, quantize_experts(whole, 32, bits))


def rewritten(made: Path, directory: Path, *path: str | int, value: object) -> Path:
    """A copy whose manifest says something else, with a digest that fits."""
    for file in made.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    store = json.loads((made / MANIFEST_NAME).read_text())["store"]
    place = store
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    canonical = json.dumps(store, sort_keys=True, separators=(",", ":")).encode()
    content = {"digest": digest_of(canonical).hexdigest(), "store": store}
    (directory / MANIFEST_NAME).write_text(json.dumps(content))
    return directory


FILE = "experts-00000.safetensors"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["version"], 2, "version 2, this program reads version 3; convert the model again"),
        (["format"], "x", "not valid: format"),
        (["bits"], 5, "not valid: bits"),
        (["bits"], 4, r"00000\.safetensors: tensor 'layers\.0\.experts\.1\.scales' is .* expected"),
        (["group_size"], 0, "not valid: group_size"),
        (["group_size"], 64, "tensor 'layers.0.experts.0.scales' is"),
        (["layers", 0, "experts"], -1, "not valid: layers.0.experts"),
        (["layers", 0, "experts"], 2, r"tensor 'layers\.0\.gate_up_bias' is"),
        (["layers", 0, "hidden"], 1 << 31, "tensor 'layers.0.experts.0.plane0' is"),
        (["layers", 0, "hidden"], 1 << 80, "not valid: layers.0.hidden"),
        (["layers", 0, "hidden"], 41, r"'layers.0.down_bias' is .* expected .*\(3, 41\)"),
        (["layers", 0, "intermediate"], 1.5, "not valid: layers.0.intermediate"),
        (["layers", 0, "parts"], 3, "not valid: layers.0.parts"),
        (["layers", 0, "dtype"], "I64", "not valid: layers.0.dtype"),
        (["layers", 0, "gate_up_bias"], "F32", "tensor 'layers.0.gate_up_bias' is"),
        (["layers", 0, "down_bias"], None, "tensor 'layers.0.down_bias' does not belong there"),
        (["layers", 0, "file"], "../x.safetensors", "not valid: layers.0.file"),
        (["layers", 0, "file"], "experts-00001.safetensors", "each layer needs a file of its own"),
        (["layers"], [], "not valid: layers"),
        (["files", FILE, "nbytes"], 7, "not valid: files"),
        (["files", FILE, "nbytes"], 999, rf"{FILE}: has \d+ bytes, the manifest says 999"),
        (["files", FILE, "header"], "0" * 32, rf"{FILE}: has a header that is not the one"),
        (["files", FILE, "data"], "x", "not valid: files"),
        (["files", FILE], None, "each layer needs a file of its own"),
        (["layers", 0, "bits"], [4, 4], "2 numbers of bits for 3 experts"),
        (["linears"], {"x": 5}, "not valid: linears"),
        (["more"], 1, "not valid: more"),
    ],
)
def test_manifests_that_lie(
    made: Path, tmp_path: Path, path: list[str | int], value: object, message: str
) -> None:
    with pytest.raises(StoreError, match=message) as caught:
        Store.open(rewritten(made, tmp_path, *path, value=value))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not valid JSON"),
        ("[]", "JSON list"),
        ("[" * 9999, "is not valid JSON"),
        ('{"store": {}, "store": {}}', "key 'store' appears twice"),
        ('{"store": 1, "digest": ""}', "needs exactly 'digest' and 'store'"),
        ('{"store": {"version": 3}, "digest": "x"}', "does not have the digest it states"),
    ],
)
def test_files_that_are_no_manifest(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(content)
    with pytest.raises(StoreError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize("left", [TRUNK_NAME, JOURNAL_NAME])
def test_what_is_left_of_a_store_is_told_from_what_never_was_one(tmp_path: Path, left: str) -> None:
    with pytest.raises(StoreError, match="is no store; moe convert MODEL STORE makes one"):
        read_manifest(tmp_path)
    (tmp_path / left).touch()
    with pytest.raises(StoreError, match="did not finish, or it was copied in part"):
        read_manifest(tmp_path)


def test_a_store_that_is_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StoreError, match=r"cannot be used: .*(loop of links|symbolic links)"):
        read_manifest(tmp_path / "loop")


def test_a_link_out_of_the_store(made: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path / "x")
    (store / FILE).unlink()
    (store / FILE).symlink_to(made / FILE)
    with pytest.raises(StoreError, match=f"{FILE}: is a link out of the model directory"):
        Store.open(store)


def test_files_that_change_while_open(tmp_path: Path) -> None:
    directory = make_store(tmp_path)
    with Store.open(directory) as store:
        os.truncate(directory / FILE, PAGE + 100)
        with pytest.raises(StoreError, match=f"{FILE} ended at byte"):
            load(store, 8)
        with pytest.raises(StoreError, match=f"{FILE} was changed while it was read"):
            store.verify_unchanged()


def test_a_refused_store_leaves_no_file_open(made: Path, tmp_path: Path) -> None:
    broken = rewritten(made, tmp_path, "layers", 0, "hidden", value=41)
    with pytest.raises(StoreError):
        Store.open(broken)
    assert num_open(broken) == 0


def test_a_file_that_cannot_be_finished_is_not_there(tmp_path: Path) -> None:
    entries = [Entry("a", torch.float32, (2,)), Entry("b", torch.float32, (2,))]

    def broken() -> Any:
        yield torch.ones(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "x.safetensors", entries, broken())
    assert not list(tmp_path.iterdir())


def test_small_files_are_whole_whoever_else_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers of one store end together, and both note their hot set."""
    path, sync = tmp_path / "hot-set.json", os.fsync

    def another_writes(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        write_bytes(path, b"second")
        sync(fd)

    monkeypatch.setattr(os, "fsync", another_writes)
    write_bytes(path, b"first")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
