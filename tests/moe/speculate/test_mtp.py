"""Multi-token prediction: what is loaded, that it is transformers' own layer, and what is left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.decode import chain
from moe.engine.engine import Engine
from moe.kv.cache import KVCache
from moe.kv.hidden import FEW, KEPT, HiddenRows
from moe.sampling import host
from moe.sequence import RunningSequence
from moe.settings import ModelSettings
from moe.speculate.draft import NEVER, Draft, Mode, Stop
from moe.speculate.mtp import MtpDrafts
from moe.speculate.passes import PassDrafts
from offload.layer import OffloadedExperts
from tests.amounts import deep_except
from tests.moe.speculate.mtp_models import transformers_draft, with_mtp
from tests.moe.speculate.test_elastic import running
from tests.moe.speculate.test_verify import chi_square_fits
from tests.moe.test_offload import SMALL, budget
from tests.readbacks import readbacks

KINDS = ["deepseek_v3", "glm4_moe"]
TRACED = [*KINDS, "qwen3_next"]
"""With a model whose steps are those of a recorded token."""
PROMPTS = [[5, 9, 3, 77, 21, 9, 3, 60], [4, 100, 17], [33] * 5]
WHOLE: dict[str, Any] = {"model": {"expert_dtype": "float32"}}
MTP = {"mode": "mtp", "max_depth": 3}


def load(folder: Path, **settings: Any) -> MoE:
    return MoE.from_pretrained(folder, SMALL | WHOLE, speculation=MTP | settings)


def drafts_of(model: MoE) -> MtpDrafts:
    speculator = model._loaded.speculation.speculator
    assert speculator is not None, model.status()["speculation"]["why"]
    drafts = speculator._passes["mtp"]
    assert isinstance(drafts, MtpDrafts)
    return drafts


def greedy(count: int = 24) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)


def tokens_of(model: MoE, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(c.token_ids) for c in model.generate(list(prompts), greedy())]


@pytest.mark.parametrize("kind", deep_except(["deepseek_v3", "qwen3_next"], TRACED))
def test_a_draft_is_what_transformers_own_layer_says(kind: str, tmp_path: Path) -> None:
    """In one pass over a prompt, and in steps over what comes behind it."""
    network, layer = with_mtp(kind, tmp_path / "model")
    model = load(tmp_path / "model")
    drafts = drafts_of(model)
    sequences = running(model, PROMPTS)
    with torch.inference_mode():
        for sequence in sequences:
            begun = drafts._begin(Mode("mtp"), [sequence], [1])
            (logits,) = drafts._run(begun)
            known = [*sequence.prompt_token_ids, *sequence.token_ids]
            expected = transformers_draft(network, layer, known)
            assert (logits[-1] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", deep_except(["deepseek_v3", "qwen3_next"], TRACED))
def test_its_cache_follows_what_the_model_accepts(kind: str, tmp_path: Path) -> None:
    """Behind steps whose drafts were rejected, it drafts as if it read the whole text at once."""
    network, layer = with_mtp(kind, tmp_path / "model")
    model = load(tmp_path / "model")
    drafts, engine = drafts_of(model), model.engine()
    group = model.request(PROMPTS[0], greedy())
    engine.submit(group)
    (sequence,) = group.sequences
    while len(sequence.token_ids) < 9:
        engine.step()
    with torch.inference_mode():
        (logits,) = drafts._run(drafts._begin(Mode("mtp"), [sequence], [1]))
        known = [*sequence.prompt_token_ids, *sequence.token_ids]
        expected = transformers_draft(network, layer, known)
    assert (logits[-1] - expected).abs().max() < 1e-4


def deciding(model: MoE) -> tuple[Engine, list[RunningSequence]]:
    """An engine, and sequences that it has just begun to decode."""
    engine = model.engine()
    assert isinstance(engine, Engine)
    groups = [model.request(prompt, greedy()) for prompt in PROMPTS]
    for group in groups:
        engine.submit(group)
    while len(engine.scheduler.running) < len(groups):
        engine.step()
    return engine, [group.sequences[0] for group in groups]


@pytest.mark.parametrize("kind", deep_except(["deepseek_v3"], KINDS))
def test_one_compiled_call_drafts_what_its_passes_draft(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For several sequences, from empty caches and behind accepted tokens, by the model's head."""
    monkeypatch.setattr(chain, "GROUP", 1 << 30)  # no copy of the head with few bits
    with_mtp(kind, tmp_path / "model")
    model = load(tmp_path / "model")
    drafts, mode, depths = drafts_of(model), Mode("mtp"), [4, 1, 3]
    assert drafts._head.chain is not None
    assert drafts._head.chain.ready
    engine, sequences = deciding(model)
    with torch.inference_mode():
        for _ in range(2):
            caches = [sequence.cache for sequence in sequences]
            before = [cache.head.length for cache in caches]  # type: ignore[union-attr]
            kept = [cache.hidden.without(0) for cache in caches]  # type: ignore[union-attr]
            passes = PassDrafts.draft(drafts, mode, sequences, depths, NEVER)
            rows = drafts.rows
            for cache, length, hidden in zip(caches, before, kept, strict=True):
                assert isinstance(cache, KVCache)
                assert cache.head is not None
                cache.head.cut(length)
                cache.hidden = hidden
            chained = drafts.draft(mode, sequences, depths, NEVER)
            assert [d.tokens for d in chained] == [d.tokens for d in passes]
            assert [len(d.tokens) for d in chained] == depths
            assert len(drafts.rows) == len(rows) == 4
            for one, other in zip(chained, passes, strict=True):
                assert one.confidence == pytest.approx(other.confidence, abs=1e-5)
            for _ in range(3):
                engine.step()


def test_tokens_of_a_draft_stay_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read back once, drawn ones too, and are those of passes that ask the host."""
    with_mtp("glm4_moe", tmp_path / "model")
    drafts = drafts_of(model := load(tmp_path / "model"))
    drafts._head.backbone.decode_by(None)  # a compiled step is the host's own
    engine = model.engine()
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 5},
        {"temperature": 1.2, "seed": 7},
    ]
    groups = [
        model.request(prompt, SamplingParams(max_new_tokens=8, ignore_eos=True, **way))
        for prompt, way in zip(PROMPTS, ways, strict=True)
    ]
    for group in groups:
        engine.submit(group)
    while not all(group.sequences[0].token_ids for group in groups):
        engine.step()
    sequences = [group.sequences[0] for group in groups]
    caches = [sequence.cache for sequence in sequences]
    before = [cache.head.length for cache in caches]  # type: ignore[union-attr]
    kept = [cache.hidden.without(0) for cache in caches]  # type: ignore[union-attr]

    @torch.inference_mode()
    def draft() -> list[Draft]:
        for cache, length, hidden in zip(caches, before, kept, strict=True):
            assert isinstance(cache, KVCache)
            assert cache.head is not None
            cache.head.cut(length)
            cache.hidden = hidden.without(0)
        random.seed(3)
        return PassDrafts.draft(drafts, Mode("mtp"), sequences, [3, 2, 3], NEVER)

    found = {}
    for stays in (False, True):
        monkeypatch.setattr(drafts, "_stays", stays)
        found[stays] = draft()
    for one, other in zip(found[False], found[True], strict=True):
        assert one.tokens == other.tokens
        assert one.confidence == pytest.approx(other.confidence, rel=1e-5)
    assert [len(one.tokens) for one in found[True]] == [3, 2, 3]
    monkeypatch.setattr(host, "on_host", lambda _: False)
    (only,) = readbacks(draft)
    assert only.startswith("to at moe/speculate/passes.py:")


def test_a_call_ends_drafts_that_do_not_pay(glm: tuple[MoE, MoE]) -> None:
    """At the token that `Stop` names, each sequence by itself."""
    drafts, mode = drafts_of(glm[1]), Mode("mtp")
    engine, sequences = deciding(glm[1])
    with torch.inference_mode():
        free = drafts.draft(mode, sequences, [4, 4, 4], NEVER)
        chances = sorted(draft.confidence[0] for draft in free)
        price = (chances[0] + chances[1]) / 4 + 0.25  # between the two, with what has been learnt
        stop = Stop((0.5, 1.0), price)
        engine.step()
        made = drafts.draft(mode, sequences, [4, 4, 4], stop)
    for draft in made:
        count = len(draft.tokens)
        assert all(stop.goes_on(draft.confidence[:n]) for n in range(1, count))
        assert count == 4 or not stop.goes_on(draft.confidence)


def test_a_known_beginning_keeps_the_layers_rows(tmp_path: Path) -> None:
    """A prefix of n tokens has the rows of its tokens but for the first, and no hidden state that
    a later token has to do with."""
    with_mtp("glm4_moe", tmp_path / "model")
    model = load(tmp_path / "model")
    (sequence,) = running(model, [PROMPTS[0] * 4])
    with torch.inference_mode():
        begun = drafts_of(model)._begin(Mode("mtp"), [sequence], [1])
        drafts_of(model)._run(begun)
    cache = sequence.cache
    assert isinstance(cache, KVCache)
    assert cache.head is not None
    assert cache.head.length == cache.length == 32
    assert not cache.hidden
    for length in (32, 31, 16, 1):
        fork = cache.fork(64, length)
        assert fork.head is not None
        assert fork.head.length == length - 1
        assert not fork.hidden
        keys, values = fork.head.read(0, fork.head.length)
        theirs = cache.head.read(0, fork.head.length)
        assert torch.equal(keys, theirs[0])
        assert torch.equal(values, theirs[1])


@pytest.mark.parametrize(
    "kind", deep_except(["deepseek_v3", "qwen3_next"], [*TRACED, "glm_moe_dsa"])
)
def test_tokens_are_those_of_no_drafts(kind: str, tmp_path: Path) -> None:
    with_mtp(kind, tmp_path / "model")
    plain = MoE.from_pretrained(tmp_path / "model", SMALL | WHOLE)
    model = load(tmp_path / "model")
    assert tokens_of(model) == tokens_of(plain)
    figures = model.stats()["speculation"]["modes"]["mtp"]
    assert figures["verified"] > 20


@pytest.mark.parametrize("kind", deep_except(["deepseek_v3"], KINDS))
def test_a_store_keeps_the_layer(kind: str, tmp_path: Path) -> None:
    """Its experts are behind the same cache as the model's; a profile without drafts, which does
    not load it, gives the same tokens."""
    network, _ = with_mtp(kind, tmp_path / "model")
    store = convert(tmp_path / "model", tmp_path / "store", ModelSettings(expert_bits=8))
    plain = MoE.from_pretrained(store, SMALL)
    layers = len(plain._loaded.experts.layers)
    assert layers == network.config.num_hidden_layers - 1  # the first is dense
    whole = MoE.from_pretrained(store, SMALL, speculation=MTP)
    half = budget(store, whole, 0.5, speculation=MTP, offload={"hot_set": False})
    for model in (whole, MoE.from_pretrained(store, half)):
        assert len(model._loaded.experts.layers) == layers
        assert tokens_of(model) == tokens_of(plain)
        assert model.stats()["speculation"]["modes"]["mtp"]["draft_bytes"] > 0
        shown = [model.expert_layout()["layers"], model.expert_activity()["layers"]]
        assert [len(each) for each in shown] == [layers, layers]
    offloaded = model._loaded.offloaded
    assert offloaded is not None
    assert len(offloaded.layers) == layers
    own = drafts_of(model)._head.experts.layers
    assert [layer.layer for layer in own if isinstance(layer, OffloadedExperts)] == [layers]
    assert offloaded.cache.statistics.layers[layers].hits > 0


def test_a_layer_that_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    with_mtp("glm4_moe", tmp_path / "model")
    file = tmp_path / "model" / "mtp.safetensors"
    tensors = load_file(file)
    norm = next(name for name in tensors if name.endswith("input_layernorm.weight"))
    del tensors[norm]
    save_file(tensors, file)
    model = load(tmp_path / "model")
    status = model.status()["speculation"]
    assert not status["enabled"]
    assert "its multi-token-prediction layer does not fit: missing:" in status["why"]
    assert len(tokens_of(model)[0]) == 24


def test_a_model_without_such_a_layer_says_so(tmp_path: Path) -> None:
    with_mtp("glm4_moe", tmp_path / "model")
    (tmp_path / "model" / "mtp.safetensors").unlink()
    model = load(tmp_path / "model")
    assert model.status()["speculation"] == {
        "enabled": False,
        "why": "the model brings no multi-token-prediction layer",
    }


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> tuple[MoE, MoE]:
    """The same tiny model without and with its layer."""
    folder = tmp_path_factory.mktemp("glm") / "model"
    with_mtp("glm4_moe", folder)
    return MoE.from_pretrained(folder, SMALL | WHOLE), load(folder)


def test_samples_have_the_models_distribution(glm: tuple[MoE, MoE]) -> None:
    """Of the two likeliest tokens each time, three times: chi-square of the eight continuations."""
    plain, model = glm
    params = SamplingParams(max_new_tokens=4, temperature=1.0, top_k=2, n=8, ignore_eos=True)
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for before, chance in chances.items():
            best = plain.logits([*PROMPTS[0], *before])[-1].topk(2)
            for token, own in zip(best.indices.tolist(), best.values.softmax(0), strict=True):
                longer[(*before, token)] = chance * float(own)
        chances = longer
    counts = Counter[tuple[int, ...]]()
    for _ in range(80):
        for completion in model.generate([PROMPTS[0]], params):
            counts[tuple(completion.token_ids[:3])] += 1
    assert counts.keys() <= chances.keys()
    places = list(chances)
    told = torch.tensor([float(counts[place]) for place in places])
    assert chi_square_fits(told, torch.tensor([chances[place] for place in places]))


def test_short_memory_cancellation_and_company_change_no_token(glm: tuple[MoE, MoE]) -> None:
    """Sequences give way to each other, are read again, share beginnings, and end early."""
    plain, model = glm
    draw = random.Random(2)
    prompts = [[draw.randrange(128) for _ in range(draw.randint(2, 20))] for _ in range(12)]
    prompts += [[*prompts[0] * 2, *prompt] for prompt in prompts[1:4]]
    expected = tokens_of(plain, prompts)
    engine = model.engine()
    assert isinstance(engine, Engine)
    engine.scheduler.kv_tokens = 150
    groups = [model.request(prompt, greedy()) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    steps = 0
    while not engine.idle:
        for _, event in engine.step():
            assert not isinstance(event, Exception), event
        steps += 1
        if steps == 10:
            engine.cancel(groups[5])
    for index, group in enumerate(groups):
        tokens = group.sequences[0].token_ids
        assert tokens == (expected[index][: len(tokens)] if index == 5 else expected[index])


def test_auto_tries_the_layer_and_tells_what_it_found(glm: tuple[MoE, MoE], tmp_path: Path) -> None:
    with_mtp("glm4_moe", tmp_path / "model")
    model = MoE.from_pretrained(
        tmp_path / "model", SMALL | WHOLE, speculation={"mode": "auto", "max_depth": 3}
    )
    assert "mtp" in model.status()["speculation"]["why"]
    assert tokens_of(model) == tokens_of(glm[0])
    assert "mtp" in model.stats()["speculation"]["control"]["expected_acceptance"]


STYLES = {
    "Qwen3-Next": ("mtp.", "mtp.layers.0.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")),
    "MiMo": (
        "model.mtp.layers.0.",
        "model.mtp.layers.0.",
        ("input_proj", "token_layernorm", "hidden_layernorm"),
    ),
}
"""Where public checkpoints keep the parts and the decoder layer, and how they call the parts."""


@pytest.mark.parametrize("style", STYLES)
def test_checkpoints_call_the_parts_differently(style: str, tmp_path: Path) -> None:
    """MiMo's projection has the columns of the hidden state first."""
    network, layer = with_mtp("glm4_moe", tmp_path / "model")
    parts, block, names = STYLES[style]
    file = tmp_path / "model" / "mtp.safetensors"
    norm = "norm" if style == "Qwen3-Next" else "final_layernorm"
    called = dict(
        zip(("eh_proj", "enorm", "hnorm", "shared_head.norm"), (*names, norm), strict=True)
    )
    renamed = {}
    for name, tensor in load_file(file).items():
        rest = name.removeprefix(f"model.layers.{network.config.num_hidden_layers}.")
        own = rest.removesuffix(".weight")
        if own == "eh_proj" and style == "MiMo":
            tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], 1).contiguous()
        renamed[f"{parts}{called[own]}.weight" if own in called else block + rest] = tensor
    save_file(renamed, file)
    drafts = drafts_of(model := load(tmp_path / "model"))
    (sequence,) = running(model, PROMPTS[:1])
    with torch.inference_mode():
        (logits,) = drafts._run(drafts._begin(Mode("mtp"), [sequence], [1]))
        known = [*sequence.prompt_token_ids, *sequence.token_ids]
        assert (logits[-1] - transformers_draft(network, layer, known)).abs().max() < 1e-4


def test_hidden_states_are_few_and_keep_little_else_alive() -> None:
    """Rows of a small pass as they are; copies of those of a large one."""
    cache = KVCache(4096)
    hidden = cache.hidden = HiddenRows()
    rows = torch.arange(12.0).view(3, 4)
    cache.length = 3
    hidden.keep(rows)
    assert hidden.joined().data_ptr() == rows.data_ptr()
    cache.cut(2)
    assert torch.equal(hidden.joined(), rows[:2])
    hidden.keep(torch.zeros(FEW + 1, 4), 5, 6)
    assert [whole.untyped_storage().nbytes() for whole, *_ in hidden._parts] == [48, 16]
    for token in range(5 * KEPT):
        hidden.keep(torch.full((1, 4), float(token)))
        assert KEPT <= max(len(hidden), KEPT) <= 2 * KEPT
    # A pass over more than are kept: none before it.
    hidden.keep(torch.arange(3.0 * KEPT)[:, None])
    assert len(hidden) == KEPT
    assert torch.equal(hidden.joined()[:, 0], torch.arange(2.0 * KEPT, 3.0 * KEPT))
