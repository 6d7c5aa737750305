"""Prefixes on disk: they come back as they were, or not at all."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.kv import BLOCK
from moe import MoE, SamplingParams
from moe.errors import ProfileError
from moe.kv import prefix_store
from moe.kv.prefix_store import PrefixStore
from moe.loading import prefix_key as names
from moe.loading.prefix_key import prefix_key
from moe.settings.profile import load_profile

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = [3 + at * at % 120 for at in range(2 * BLOCK + 9)]

Load = Callable[..., MoE]


@pytest.fixture
def load(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Load:
    def load(directory: str = "kept", **memory: Any) -> MoE:
        memory = {"prefix_dir": str(tmp_path / directory), "kv_bits": 16} | memory
        return MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), memory=memory)

    return load


def ask(model: MoE, prompt: list[int] = PROMPT, salt: str = "") -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were known."""
    engine, group = model.engine(), model.request(prompt, GREEDY, salt)
    engine.submit(group)
    while not engine.idle:
        engine.step()
    return group.sequences[0].token_ids, group.sequences[0].num_cached_tokens


def counters(model: MoE) -> dict[str, int]:
    status: dict[str, int] = model.engine().status()["prefixes"]
    return status


def test_the_key_is_what_bits_depend_on(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, plain = torch.device("cpu"), load_profile(None, {}).profile
    source = tiny_checkpoint("qwen3_moe")

    def key(model: Path = source, bits: int = 16, **settings: Any) -> str:
        profile = load_profile(None, {"model": settings}).profile if settings else plain
        return prefix_key(model, profile, cpu, bits)

    for name in ("one", "two"):  # as processes write those of a GGUF model
        shutil.copytree(source, tmp_path / name)
    os.utime(tmp_path / "two" / "config.json", ns=(0, 0))
    same = key(tmp_path / "one")
    assert key(tmp_path / "two") == same
    assert key(verify=True, check_finite=True, context_length=100) == key()
    assert key(bits=8) != key()
    assert key(expert_bits=4) != key()
    (tmp_path / "two" / "config.json").write_text("{}")
    assert key(tmp_path / "two") != same
    os.utime(next((tmp_path / "one").glob("*.safetensors")), ns=(0, 0))
    assert key(tmp_path / "one") != same
    known = key()
    monkeypatch.setattr(names, "instruction_sets", lambda: ["AVX2"])
    assert key() != known


def test_another_run_reads_what_one_has_left(load: Load, tmp_path: Path) -> None:
    with load() as first:
        answer, known = ask(first)
        assert known == 0
    files = list((tmp_path / "kept").glob("*/*"))
    assert {file.suffix for file in files} == {".kv"}
    assert len(files) == 2
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    with load() as second:
        assert ask(second) == (answer, 2 * BLOCK)
        assert ask(second, [*PROMPT[:BLOCK], 5, 6])[1] == BLOCK
        assert ask(second, salt="another")[1] == 0
        assert counters(second)["restored_tokens"] == 2 * BLOCK
        longer = [*PROMPT[: 2 * BLOCK], *range(3, 3 + BLOCK), 9]
        answer, known = ask(second, longer)
        assert known == 2 * BLOCK
    assert len(list((tmp_path / "kept").glob("*/*.kv"))) == 3 + 2  # a block, and the other salt's
    with load() as third:
        assert ask(third, longer) == (answer, 3 * BLOCK)
    with load(kv_bits=8) as other:
        assert ask(other)[1] == 0, "other settings give other bits"


def test_what_is_evicted_comes_back_in_the_same_run(load: Load) -> None:
    with load(prefix_tokens=3 * BLOCK) as model:
        answer, _ = ask(model)
        ask(model, [7] * (2 * BLOCK + 1))
        prefixes = model.engine().scheduler.prefixes
        assert prefixes is not None
        assert prefixes.num_cached("", PROMPT) == 0
        deadline = time.monotonic() + 20
        while counters(model)["saved_blocks"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ask(model) == (answer, 2 * BLOCK)


def test_others_get_tokens_while_a_prefix_is_read_from_disk(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load() as first:
        answer, _ = ask(first)
    slow, read = threading.Event(), PrefixStore._read

    def wait_and_read(*given: Any) -> Any:
        assert slow.wait(20)
        return read(*given)

    monkeypatch.setattr(PrefixStore, "_read", wait_and_read)
    with load() as model:
        engine, group = model.engine(), model.request(PROMPT, GREEDY)
        other, gone = model.request([5, 6, 7], GREEDY), model.request(PROMPT, GREEDY)
        for each in (group, other, gone):
            engine.submit(each)
        while not other.sequences[0].finish_reason:
            engine.step()
        prefixes = engine.scheduler.prefixes
        assert prefixes is not None
        assert not group.sequences[0].token_ids
        assert prefixes.num_tokens >= 2 * BLOCK, "what is on its way has room"
        engine.cancel(gone)
        assert not engine.step()
        slow.set()
        while not engine.idle:
            engine.step()
        assert group.sequences[0].token_ids == answer
        assert group.sequences[0].num_cached_tokens == 2 * BLOCK
        assert counters(model)["restored_tokens"] == 2 * BLOCK
        assert counters(model)["asked_tokens"] == len(PROMPT) + 3


@pytest.mark.parametrize(("room", "known"), [(9, [3, 3, 3]), (3, [3, 2, 2])])
def test_what_requests_have_in_common_is_read_from_disk_once(
    load: Load, monkeypatch: pytest.MonkeyPatch, room: int, known: list[int]
) -> None:
    """As chats with one system prompt. What each has beside it is read where there is room."""
    asked, read = threading.Event(), PrefixStore._read

    def wait_and_read(*given: Any) -> Any:
        assert asked.wait(20)
        return read(*given)

    monkeypatch.setattr(PrefixStore, "_read", wait_and_read)
    chats = [[*PROMPT[: 2 * BLOCK], *[5 + number] * (BLOCK + 9)] for number in range(3)]
    with load() as first:
        answers = [ask(first, chat)[0] for chat in chats]
    with load(prefix_tokens=room * BLOCK) as second:
        engine, groups = second.engine(), [second.request(chat, GREEDY) for chat in chats]
        for group in groups:
            engine.submit(group)
        engine.step()
        asked.set()
        while not engine.idle:
            engine.step()
        assert [group.sequences[0].token_ids for group in groups] == answers
        cached = [group.sequences[0].num_cached_tokens for group in groups]
        assert cached == [blocks * BLOCK for blocks in known]
        assert counters(second)["restored_tokens"] == (sum(known) - 4) * BLOCK


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "foreign", "head"])
def test_a_damaged_file_is_dropped_with_a_notice(
    load: Load, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    with load() as first:
        answer, _ = ask(first)
    for file in (tmp_path / "kept").glob("*/*.kv"):
        content = bytearray(file.read_bytes())
        content[-7] ^= 1 if harm == "flip" else 0
        content[9] ^= 1 if harm == "head" else 0
        content = content[: {"cut": len(content) // 2, "empty": 0}.get(harm, len(content))]
        file.write_bytes(b"GGUF" + content if harm == "foreign" else content)
    with load() as second:
        assert ask(second) == (answer, 0)
        assert counters(second)["dropped_files"] == 1
    assert "a saved prefix is" in caplog.text
    with load() as third:  # the second has written the block again; those behind it are damaged
        assert ask(third) == (answer, BLOCK)


def test_what_a_killed_process_leaves_is_discarded(load: Load, tmp_path: Path) -> None:
    with load() as first:
        ask(first)
    (folder,) = (tmp_path / "kept").iterdir()
    stale, new = folder / "a.unfinished", folder / "b.unfinished"
    for file in (stale, new):
        file.write_bytes(b"MOEKV")
    os.utime(stale, (1, 1))
    with load() as second:
        assert not stale.exists()
        assert new.exists(), "another process may be writing it"
        assert ask(second)[1] == 2 * BLOCK


def test_a_full_disk_ends_the_saving_only(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prefix_store.os, "utime", full)
    with load() as model:
        answer, _ = ask(model)
        assert ask(model) == (answer, 2 * BLOCK)
    assert caplog.text.count("no more prefixes are saved") == 1
    assert "No space left on device" in caplog.text
    assert not [file for file in (tmp_path / "kept").glob("*/*") if file.is_file()]


def test_the_directory_is_bounded_and_the_end_of_a_prompt_goes_first(
    load: Load, tmp_path: Path
) -> None:
    with load() as first:
        answer, _ = ask(first)
    size = next((tmp_path / "kept").glob("*/*.kv")).stat().st_size
    with load(prefix_dir_gib=1.5 * size / 2**30) as second:
        assert len(list((tmp_path / "kept").glob("*/*.kv"))) == 1
        assert ask(second) == (answer, BLOCK)


def test_a_directory_that_others_can_read_is_refused(load: Load, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ProfileError, match=r"this user alone \(mode 0700\); it has mode 0755"):
        load("open")
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be used: File exists"):
        load("file")


def test_where_nothing_can_be_saved_a_notice_says_why(load: Load) -> None:
    with load(prefix_tokens=0) as model:
        assert "memory.prefix_dir changes nothing: there is no prefix cache" in model.notices


def test_a_soak_gives_what_is_given_without_a_cache_and_leaves_no_block(load: Load) -> None:
    """Prompts that begin alike, samples, cancellations, evictions to disk and restarts."""
    rng, answers = random.Random(5), dict[tuple[int, ...], list[int]]()
    begun = [[rng.randrange(3, 120) for _ in range(180)] for _ in range(3)]
    plain = load(prefix_tokens=0, prefix_dir=None)
    for _ in range(2):
        model = load(kv_tokens=900, prefix_tokens=500, prefix_dir_gib=2e-4)
        engine, live = model.engine(), []
        for _ in range(50):
            if rng.random() < 0.4:
                prompt = begun[rng.randrange(3)][: rng.randrange(20, 180)]
                prompt += [rng.randrange(3, 120) for _ in range(rng.randrange(30))]
                params = replace(GREEDY, n=rng.choice([1, 1, 2]))
                live.append(model.request(prompt, params, str(rng.randrange(2))))
                engine.submit(live[-1])
            if live and rng.random() < 0.08:
                engine.cancel(live.pop(rng.randrange(len(live))))
            engine.step()
            assert engine.scheduler.num_used_tokens() <= 900
        while not engine.idle:
            engine.step()
        for sequence in [sequence for group in live for sequence in group.sequences]:
            key = tuple(sequence.prompt_token_ids)
            if key not in answers:
                answers[key] = plain.generate([list(key)], GREEDY)[0].token_ids
            assert sequence.token_ids == answers[key]
        assert counters(model)["restored_tokens"] > 0
        assert not any(engine.occupancy().values())
        prefixes, pool = engine.scheduler.prefixes, model.backbone.blocks
        assert prefixes is not None
        assert prefixes.store is not None
        assert pool is not None
        while prefixes.evict():
            pass
        prefixes.store.finish()
        assert pool.held_tokens == 0
        model.close()
