"""Weights that do not fit the configuration: all listed in one error, before anything is read.

The faults of models and stores that loading must survive, and where each is tested:

==== ==============================================================================================
A8   `test_files`: headers too long, too short, not UTF-8, not JSON, with a key twice
A9   `test_files`: sizes and offsets that the file does not have; `tests/experts/test_store.py`
A10  `test_files`: tensors that overlap
A11  `test_files`: absent, empty, cut, not what the index says; all in one error
A12  here: missing and unexpected; `test_loading`: nothing is initialised at random
A13  here: shapes and dtypes; `test_config`: sizes, top-k beyond the experts
A14  here, `test_store`: named; `tests/moe/engine/test_prompt_logprobs.py`: in a request
A15  `test_files`, `tests/experts/test_store.py`: paths and links out of the directory
A16  `test_damage`, `test_loading`, `tests/experts/test_store.py`: files that change while open
A19  `test_config`, `tests/experts/test_store.py`: integers that are 0, negative, vast or none
E14  `test_quantized`: scales that are missing or of other blocks; `tests/experts/test_store.py`
==== ==============================================================================================

Files damaged at random: here, `test_damage`, `test_config`, `test_gguf_faults`,
`tests/experts/test_store.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter

from moe.errors import CheckpointError
from moe.loading import plan as weight_plan
from moe.loading.checkpoint import Checkpoint
from moe.loading.hub import read_config
from moe.loading.load import load_weights, plan_weights
from moe.loading.meta_model import _DRAFTING, build_meta_model

EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def load(path: Path, check_finite: bool = False) -> PreTrainedModel:
    model = build_meta_model(read_config(path))
    with Checkpoint.open(path) as checkpoint:
        weights = plan_weights(model, checkpoint, lambda name, stored: torch.float32)
        load_weights(model, checkpoint, weights, device="cpu", check_finite=check_finite)
    return model


def test_missing_tensors_are_named_even_inside_a_merge(edited: Callable[..., Path]) -> None:
    path = edited({EXPERT: None, "model.norm.weight": None})
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(caught.value).splitlines() == [
        f"the weights in {path} do not fit Qwen3MoeForCausalLM (2 problems):",
        f"  - missing: {EXPERT}",
        "  - missing: model.norm.weight (32,)",
    ]


def test_unexpected_tensor(edited: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.9\.x\.weight \(2, 3\)"):
        load(edited({"model.layers.9.x.weight": torch.ones(2, 3)}))
    ninth = EXPERT.replace(".5.", ".8.")
    with pytest.raises(CheckpointError, match=f"unexpected: {ninth}"):
        load(edited({ninth: torch.ones(24, 32)}))


@pytest.mark.parametrize("word", _DRAFTING)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_layers_behind_the_last_that_draft_are_left_out(
    word: str, count: int, edited: Callable[..., Path]
) -> None:
    """However deep the model is: transformers' lists know the sizes that were published first."""
    file = edited({}) / "config.json"
    config = json.loads(file.read_text())
    first = config["num_hidden_layers"]
    names = [f"model.layers.{i}" for i in (f"{first}.a", f"{first}.b.c", f"{first + 1}.a")]
    path = edited({name: torch.ones(2, 2) for name in names})
    file.write_text(json.dumps(config | {word: count}))
    if count == 2:
        load(path)
        return
    with pytest.raises(CheckpointError) as caught:
        load(path)
    left = names if not count else names[2:]
    assert [line.split()[2] for line in str(caught.value).splitlines()[1:]] == left


@pytest.mark.parametrize(
    ("theirs", "ours", "more"),
    [
        ("transformer.", "model.", {}),
        ("module.", "", {"lm_head.weight": True}),
        ("thinker.language_model.", "model.", {}),
    ],
)
def test_names_that_differ_by_what_they_begin_with(
    theirs: str, ours: str, more: dict[str, bool], edited: Callable[..., Path]
) -> None:
    path = edited({})
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {
            theirs + name.removeprefix(ours) if more or name.startswith(ours) else name: tensor
            for name, tensor in tensors.items()
        },
        file,
    )
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(caught.value).splitlines()[1:] == [
        f"  - names of tensors begin with {theirs!r} where the model's begin with {ours!r}, and "
        "fit otherwise; rename them"
    ]
    file.unlink()
    save_file(tensors | {"odd.layers.0.weight": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match=r"unexpected: odd\.layers"):
        load(path)


def test_wrong_shape(edited: Callable[..., Path]) -> None:
    message = r"wrong shape: model\.norm\.weight is \(31,\), the configuration says \(32,\)"
    with pytest.raises(CheckpointError, match=message):
        load(edited({"model.norm.weight": torch.ones(31)}))
    message = r"wrong shape: model\.layers\.1\.mlp\.experts\.gate_up_proj \(from .* and 15 more\)"
    with pytest.raises(CheckpointError, match=message):
        load(edited({EXPERT: torch.ones(23, 32)}))


def test_integers_where_numbers_belong(edited: Callable[..., Path]) -> None:
    message = r"wrong dtype: model\.norm\.weight is torch\.int32, the model has torch\.float32"
    with pytest.raises(CheckpointError, match=message):
        load(edited({"model.norm.weight": torch.ones(32, dtype=torch.int32)}))


def test_all_faults_come_in_one_error_and_nothing_is_read(
    edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read_into", lambda *_, **__: pytest.fail("read"))
    path = edited(
        {EXPERT: None, "lm_head.weight": torch.ones(2), "extra": torch.ones(1)}
        | {"model.norm.weight": None}
    )
    with pytest.raises(CheckpointError, match=r"(?s)4 problems.*missing.*missing.*unexpected"):
        load(path)


def test_two_tensors_for_one_parameter(edited: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"both .*norm\.weight and .*norm\.weight give "):
        load(edited({"norm.weight": torch.ones(32)}))


def test_tensors_that_a_conversion_would_drop(
    edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Chunk` takes the first of the tensors that match its pattern and forgets the others."""
    converter = WeightConverter("final.*.weight", "model.norm.weight", [Chunk(dim=0)])
    known = weight_plan.get_model_conversion_mapping
    monkeypatch.setattr(
        weight_plan, "get_model_conversion_mapping", lambda model: [*known(model), converter]
    )
    path = edited(
        {"model.norm.weight": None} | {f"final.{i}.weight": torch.ones(32) for i in range(2)}
    )
    with pytest.raises(CheckpointError, match="the conversion leaves some of it unused"):
        load(path)


def test_not_finite_values_are_named(edited: Callable[..., Path]) -> None:
    bad = torch.ones(24, 32)
    bad[3, 4] = float("nan")
    path = edited({EXPERT: bad, "model.norm.weight": torch.full((32,), float("inf"))})
    load(path)
    with pytest.raises(CheckpointError) as caught:
        load(path, check_finite=True)
    assert f"{EXPERT} in model.safetensors holds NaN or infinity" in str(caught.value)
    assert "model.norm.weight in model.safetensors holds NaN or infinity" in str(caught.value)


def test_both_of_a_tied_pair_missing(edited: Callable[..., Path]) -> None:
    path = edited({"lm_head.weight": None, "model.embed_tokens.weight": None})
    config = path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load(path)


@pytest.mark.parametrize("dot", [".5.up", "experts.", "up_proj."])
def test_a_name_that_only_looks_right_is_not_stacked_out_of_order(
    dot: str, edited: Callable[..., Path]
) -> None:
    damaged = EXPERT.replace(dot, dot.replace(".", "0", 1))
    path = edited({EXPERT: None, damaged: torch.ones(24, 32)})
    with pytest.raises(CheckpointError, match=f"unexpected: {damaged}|missing: {EXPERT}"):
        load(path)


@given(data=st.data())
def test_any_damage_is_refused_or_loads_what_is_stored(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Edits of the header, where names, dtypes, shapes and offsets are; then an edit anywhere."""
    path = tmp_path_factory.mktemp("damaged")
    (path / "config.json").write_bytes((saved / "config.json").read_bytes())
    content = bytearray((saved / "model.safetensors").read_bytes())
    header = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(8, 7 + header))] = data.draw(st.sampled_from(b'0123I6,"x'))
    content[data.draw(st.integers(8 + header, len(content) - 1))] = data.draw(st.integers(0, 255))
    (path / "model.safetensors").write_bytes(content)
    try:
        model = load(path)
    except CheckpointError:
        return
    stored = load_file(path / "model.safetensors")
    kept = model.state_dict()
    for name in stored.keys() & kept.keys():
        assert torch.equal(kept[name].nan_to_num(), stored[name].float().nan_to_num()), name
    for expert in range(8):
        one = f"model.layers.2.mlp.experts.{expert}."
        both = torch.cat([stored[f"{one}gate_proj.weight"], stored[f"{one}up_proj.weight"]])
        place = kept["model.layers.2.mlp.experts.gate_up_proj"][expert]
        assert torch.equal(place.nan_to_num(), both.float().nan_to_num())
