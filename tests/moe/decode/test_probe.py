"""A description that is wrong in any of its parts does not pass the probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from examples.models.tiny import tiny_config, tiny_model
from kernels.cpu import choose_kernel
from moe.decode.compiled import DescribedStep
from moe.decode.proof import prove
from moe.describe import routers as router
from moe.describe.decoder import describe
from moe.describe.description import Description, Experts, Layer, NotDescribed, OwnRouter, Router
from moe.describe.extremes import check_extremes
from moe.describe.observe import WATCHED, observe
from moe.describe.probe import enable_packing
from moe.network.backbone import Backbone
from moe.network.moe_layer import MoELayers
from moe.network.seam import attach, take_experts

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")

Change = Callable[[Layer], Layer]


def trunk_of(architecture: str, config: Any = None) -> Backbone:
    model = tiny_model(architecture, config=config)
    experts = MoELayers(take_experts(model))
    attach(model, experts.layers, experts.run)
    backbone = Backbone(model)
    assert enable_packing(backbone).enabled
    return backbone


def described(backbone: Backbone) -> Description:
    return describe(backbone.model, observe(backbone, [[5, 6, 7, 8, 1, 2, 3], [9, 1, 1, 2]]))


def proof(backbone: Backbone, description: Description) -> str:
    kernel, _ = choose_kernel()
    assert kernel is not None
    return prove(backbone, description, DescribedStep(description, kernel.decode))


def in_attention(**changes: object) -> Change:
    return lambda layer: replace(layer, attention=replace(layer.attention, **changes))  # type: ignore[arg-type]


def in_view(**changes: object) -> Change:
    return lambda layer: replace(
        layer,
        attention=replace(layer.attention, view=replace(layer.attention.view, **changes)),  # type: ignore[arg-type]
    )


def in_rotation(**changes: object) -> Change:
    def change(layer: Layer) -> Layer:
        rotation = layer.attention.rotation
        assert rotation is not None
        return in_attention(rotation=replace(rotation, **changes))(layer)  # type: ignore[arg-type]

    return change


def in_feed(**changes: object) -> Change:
    return lambda layer: replace(layer, feed=replace(layer.feed, **changes))  # type: ignore[arg-type]


def in_router(**changes: object) -> Change:
    def change(layer: Layer) -> Layer:
        assert isinstance(layer.feed, Experts)
        assert isinstance(layer.feed.router, Router)
        rule = replace(layer.feed.router.rule, **changes)  # type: ignore[arg-type]
        router = replace(layer.feed.router, rule=rule)
        return replace(layer, feed=replace(layer.feed, router=router))

    return change


WRONG: dict[str, tuple[str, Change]] = {
    "scale": ("mixtral", in_view(scale=0.251)),
    "window": ("mixtral", in_view(window=7)),
    "no window": ("gpt_oss", in_view(window=5)),
    "sinks": ("gpt_oss", in_view(sinks=None)),
    "soft cap": ("olmoe", in_view(softcap=20.0)),
    "rotation": ("qwen3_moe", in_rotation(style="pairs")),
    "pairs": ("deepseek_v3", in_rotation(style="pairs")),
    "no rotation": ("olmoe", in_attention(rotation=None)),
    "part of a head": ("glm4_moe", in_rotation(begin=4)),
    "query norm": ("qwen3_moe", in_attention(q_norm=None)),
    "norm": ("mixtral", lambda layer: replace(layer, feed_norm=None)),
    "residual": ("granitemoe", lambda layer: replace(layer, attention_scale=0.9)),
    "feed scale": ("granitemoe", lambda layer: replace(layer, feed_scale=1.01)),
    "weights": ("mixtral", in_router(renormalise=False)),
    "groups": ("glm4_moe", in_router(groups=1, groups_kept=1)),
    "correction": ("dots1", in_router(correction=None)),
    "mixer": ("phimoe", in_router(mixer_threshold=0.5)),
    "shared expert": (
        "qwen2_moe",
        in_feed(shared=None, shared_gate=None),
    ),
    "shared gate": (
        "qwen2_moe",
        in_feed(shared_gate=None),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_part_is_found_and_its_layer_named(what: str) -> None:
    architecture, change = WRONG[what]
    backbone = trunk_of(architecture)
    right = described(backbone)
    assert "equal to transformers' forward" in proof(backbone, right)
    index = len(right.layers) - 2
    layers = list(right.layers)
    layers[index] = change(layers[index])
    dense = sum(not isinstance(layer.feed, Experts) for layer in layers)
    with pytest.raises(
        NotDescribed, match=f"differ.*(; .*layer {index}|MoE layer {index - dense})$"
    ):
        proof(backbone, replace(right, layers=tuple(layers)))


@pytest.mark.parametrize(
    "changes", [{"logit_scale": 0.5}, {"logit_softcap": 3.0}, {"embedding_scale": 1.1}]
)
def test_wrong_ends_are_found(changes: dict[str, Any]) -> None:
    backbone = trunk_of("olmoe")
    with pytest.raises(NotDescribed, match="differ"):
        proof(backbone, replace(described(backbone), **changes))


def test_a_step_that_computes_something_else_is_found() -> None:
    backbone = trunk_of("olmoe")
    right = described(backbone)
    kernel, _ = choose_kernel()
    assert kernel is not None
    step = DescribedStep(right, kernel.decode)
    with pytest.raises(NotDescribed, match=r"logits differ by .*e-04$"):
        prove(
            backbone,
            right,
            lambda work, routed: [rows * 1.0005 for rows in step(work, routed)],
        )
    with pytest.raises(NotDescribed, match="logits differ by nan"):
        prove(
            backbone,
            right,
            lambda work, routed: [rows * torch.nan for rows in step(work, routed)],
        )


@pytest.mark.parametrize("architecture", ["mixtral", "dots1", "phimoe"])
def test_a_router_without_a_known_rule_is_called_itself(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "_routers", lambda *_: [])
    backbone = trunk_of(architecture)
    right = described(backbone)
    feeds = [layer.feed for layer in right.layers if isinstance(layer.feed, Experts)]
    assert all(isinstance(feed.router, OwnRouter) for feed in feeds)
    assert "equal to transformers' forward" in proof(backbone, right)


def test_watching_leaves_the_model_as_it_was() -> None:
    backbone = trunk_of("mixtral")
    observe(backbone, [[1, 2, 3]])
    assert backbone.model.config._attn_implementation != WATCHED
    assert not any(module._forward_hooks for module in backbone.model.modules())


def test_what_only_large_numbers_show_is_found() -> None:
    backbone = trunk_of("olmoe")
    backbone.model.config.clip_qkv = 100.0
    unclipped = described(backbone)
    assert "equal to transformers' forward" in proof(backbone, unclipped)
    with pytest.raises(NotDescribed, match=r"layer 0: .* at far positions or with large numbers"):
        check_extremes(unclipped, backbone)
    backbone.model.config.clip_qkv = None
    check_extremes(unclipped, backbone)


def test_what_only_far_positions_show_is_found() -> None:
    config = tiny_config("mistral4")
    config.rope_parameters |= {"partial_rotary_factor": 1.0}
    backbone = trunk_of("mistral4", config)
    positions = backbone.model.config.rope_parameters
    positions |= {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192}
    unscaled = described(backbone)
    assert "equal to transformers' forward" in proof(backbone, unscaled)
    with pytest.raises(NotDescribed, match=r"layer 0: queries .* at far positions or with large"):
        check_extremes(unscaled, backbone)
    positions["llama_4_scaling_beta"] = 0.0
    check_extremes(unscaled, backbone)
