"""A model that writes canvases on two ranks: the tokens of one, and of transformers.

As a script, what each rank does: ``python test_ranks.py STORE OUT``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.parallel.remote import EngineMirror, RemoteCache
from moe.sequence import RunningSequence
from moe.settings import ModelSettings
from tests.methods.diffusion.test_runner import CHUNKS, LONG
from tests.methods.diffusion.test_writer import SIZES, Pair, make_model
from tests.parallel.generation import PROMPTS as TEXTS
from tests.parallel.test_parallel_engine import parallel, tokens_of

PROMPTS = [LONG, LONG[:20], [11, 3], LONG[4:30], LONG]
SETTINGS: dict[str, Any] = {
    "memory.kv_tokens": 100,  # so that a rank preempts
    "memory.prefix_tokens": 50,
    **CHUNKS,
}


def refreshing(rule: str) -> dict[str, Any]:
    return SETTINGS | {"lossless": False, "methods.diffusion.refresh": rule}


def written(model: MoE, num_new: int) -> list[list[int]]:
    """One engine: all prompts at once, then again behind what is known."""
    engine, found = model.loop(), []
    for _ in range(2):
        params = [
            SamplingParams(max_new_tokens=num_new, ignore_eos=True, seed=seed, logprobs=1)
            for seed in range(len(PROMPTS))
        ]
        groups = [model.request(p, one) for p, one in zip(PROMPTS, params, strict=True)]
        for group in groups:
            engine.submit(group)
        cancelled = model.request(LONG, params[0])
        engine.submit(cancelled)
        engine.step()
        engine.cancel(cancelled)
        while not engine.idle:
            for sequence, event in engine.step():
                assert not isinstance(event, Exception), event
                assert event.token.logprob is not None, sequence
        found += [group.sequences[0].token_ids for group in groups]
        assert not any(engine.occupancy().values())
    prefixes = engine.status()["prefixes"]
    assert prefixes["hit_tokens"] > 0
    return found


@pytest.mark.deep
def test_two_ranks_leave_out_the_rows_that_one_does(launch: Any, tmp_path: Path) -> None:
    whole = ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    store = convert(make_model(tmp_path / "model", **SIZES[1]), tmp_path / "store", whole)
    out = tmp_path / "out.json"
    with launch(2, [__file__, store, out, "elastic:0.6:3"]) as launched:
        with MoE.from_pretrained(store, refreshing("elastic:0.6:3")) as model:
            expected = written(model, 2 * SIZES[1]["canvas"])
        assert launched.codes() == [0, 0], launched.everything()
    found = json.loads(out.read_text())
    assert found["written"] == expected
    assert found["preempted"] > 0


@pytest.mark.deep
def test_two_ranks_write_what_transformers_writes(launch: Any, tmp_path: Path) -> None:
    whole = ModelSettings(expert_bits=16, trunk_bits=16, head_bits=16)
    path = make_model(tmp_path / "model", **SIZES[1])
    store, out = convert(path, tmp_path / "store", whole), tmp_path / "out.json"
    with launch(2, [__file__, store, out]) as launched:
        pair = Pair(path)
        expected = [pair.expected(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
        assert launched.codes() == [0, 0], launched.everything()
    found = json.loads(out.read_text())
    assert found["written"] == 2 * expected
    assert found["preempted"] > 0
    assert found["slots"] < 3 * SIZES[1]["experts"]  # each rank holds its part
    for rank in found["stats"]["ranks"]:
        assert rank["pairs"] > 0
        assert rank["bytes_out"] > 0


def test_canvases_that_a_lost_rank_has_written_do_not_come_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MoE.from_pretrained(make_model(tmp_path / "model", **SIZES[1]))
    params = [
        SamplingParams(seed=seed, max_new_tokens=24, ignore_eos=True) for seed in range(len(TEXTS))
    ]
    expected = tokens_of(model.loop(), model, params)
    begun: list[int] = []
    new_sequence = EngineMirror._new_sequence

    def counted(self: EngineMirror, fields: Any) -> Any:
        begun.append(len(fields["tokens"]))
        return new_sequence(self, fields)

    monkeypatch.setattr(EngineMirror, "_new_sequence", counted)
    engine, loopback = parallel(model, 3)
    loopback.lost_at = {9: 1, 20: 2}
    assert tokens_of(engine, model, params) == expected
    assert loopback.links.ranks == [0]
    assert max(begun) > 0  # some rank took over behind the first canvas


def main() -> None:
    store, out, *refresh = sys.argv[1:]
    own = refreshing(*refresh) if refresh else SETTINGS
    model = MoE.from_pretrained(store, "expert-parallel", **own)
    if model.rank:
        model.serve_rank()
    else:
        preempted: list[Any] = []
        release = RunningSequence.release

        def released(self: RunningSequence) -> None:
            if self.cache is not None and self.finish_reason is None and not self.cancelled:
                preempted.append(self.cache)
            release(self)

        # The copies that rank 0 computes are released in each step, and have other caches.
        RunningSequence.release = released  # type: ignore[method-assign]
        found: dict[str, Any] = {"written": written(model, 2 * SIZES[1]["canvas"])}
        found["preempted"] = sum(isinstance(cache, RemoteCache) for cache in preempted)
        stats = model.stats()
        found["stats"], found["slots"] = stats["parallel"], (stats["offload"] or {}).get("slots")
        Path(out).write_text(json.dumps(found))
    model.close()


if __name__ == "__main__":
    main()
