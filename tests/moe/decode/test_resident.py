"""Steps that run experts by themselves give the bits of a call a layer, and count the same."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int64
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import experts_forward
from kernels.cpu import choose_kernel
from moe import MoE, SamplingParams
from moe.decode import compiled as fused_step
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from routing import parse_policies
from tests.amounts import deep_except
from tests.kernels.kernel_cases import make_case
from tests.moe.decode.test_fused import PROVEN

pytestmark = pytest.mark.skipif(choose_kernel()[0] is None, reason="no C++ compiler")


def asked(model: MoE) -> list[int]:
    """Grows by each layer that is asked for its rows."""
    experts, layers = model.experts, list[int]()
    gather = experts.gather

    def noted(layer: int, calls: Any) -> Any:
        layers.append(layer)
        return gather(layer, calls)

    experts.gather = noted  # type: ignore[method-assign]
    return layers


@contextmanager
def a_call_a_layer(model: MoE) -> Iterator[None]:
    """Experts have a kernel of their own, so each layer is asked."""
    model.experts.forward = partial(experts_forward)
    try:
        yield
    finally:
        model.experts.forward = experts_forward


def decoded(model: MoE, counts: list[int]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Logits of some steps of so many sequences, and statistics."""
    model.reset_stats()
    backbone, run = model.backbone, model.experts.run
    caches = [backbone.new_cache(count + 20) for count in counts]
    prompts = [[5 + (i * k) % 90 for k in range(n)] for i, n in enumerate(counts)]
    found: list[Tensor] = []
    for tokens in (prompts, *[[[7 + i % 80] for i in range(len(counts))]] * 3):
        work = [Work(t, c, all_logits=True) for t, c in zip(tokens, caches, strict=True)]
        lanes = backbone.lanes(work, "decode")
        run_lanes(lanes, run)
        found += [rows for lane in lanes for rows in lane.result()]
    return found, model.stats()["layers"]


@pytest.mark.parametrize("architecture", deep_except(["qwen3_moe", "deepseek_v3"], PROVEN))
@torch.inference_mode()
def test_models_decode_to_the_same_bits_and_counts(
    architecture: str, tiny_moe: Callable[[str], MoE]
) -> None:
    model = tiny_moe(architecture)
    why = model.status()["fused"]["why"]
    assert why.endswith("experts inside"), why
    # Longer than the sliding windows of the tiny models.
    for counts in ([3], [1, 40, 7, 2], list(range(1, 17))):
        actual = decoded(model, counts)
        with a_call_a_layer(model):
            expected = decoded(model, counts)
        assert all(map(torch.equal, actual[0], expected[0]))
        assert actual[1] == expected[1]


def test_nobody_is_asked_while_only_decoding_goes_on(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), engine={"max_batch_size": 2})
    layers = asked(model)
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    tokens = [c.token_ids for c in model.generate([[5, 6, 7], [9, 8], [1, 2, 3]], params)]
    steps = model.stats()["layers"][0]["steps"]
    # Two prompts are read together, the third while another decodes.
    assert 2 <= layers.count(0) < steps
    model.reset_stats()
    with a_call_a_layer(model):
        layers.clear()
        assert tokens == [
            c.token_ids for c in model.generate([[5, 6, 7], [9, 8], [1, 2, 3]], params)
        ]
    assert layers.count(0) == steps == model.stats()["layers"][0]["steps"]


@torch.inference_mode()
def test_whoever_wants_to_act_at_a_layer_is_asked(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("mixtral"))
    backbone, experts, own = model.backbone, model.experts, list(model.experts.layers)
    layers = asked(model)
    (cache, other) = (backbone.new_cache(40) for _ in range(2))
    for each in (cache, other):
        run_lanes(backbone.lanes([Work([1, 2, 3], each)]), experts.run)

    def decode(run: Any = experts.run, caches: Any = (cache,)) -> list[int]:
        layers.clear()
        run_lanes([lane for c in caches for lane in backbone.lanes([Work([4], c)], "decode")], run)
        return list(layers)

    everywhere = list(range(len(own)))
    assert decode() == []
    assert decode(lambda layer, visits: experts.run(layer, visits)) == everywhere  # e.g. a draft
    assert decode(caches=(cache, other)) == everywhere
    experts.layers[0] = make_case(1, own[0].num_experts, 1, own[0].hidden_size, 8).experts
    assert decode() == everywhere
    experts.layers[0] = own[0]
    experts.policies = parse_policies(["top_k:1"], lossless=False)
    assert decode() == everywhere
    experts.policies = parse_policies([], lossless=True)
    assert decode() == []


@torch.inference_mode()
def test_an_interrupt_between_layers_leaves_no_trace(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_step, "PATIENCE", -1.0)
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"))
    backbone, experts = model.backbone, model.experts
    cache = backbone.new_cache(40)
    run_lanes(backbone.lanes([Work([1, 2, 3], cache)]), experts.run)

    def decode() -> Tensor:
        (lane,) = backbone.lanes([Work([4], cache)], "decode")
        run_lanes([lane], experts.run)
        return lane.result()[0]

    kernel, _ = choose_kernel()
    assert kernel is not None
    call, done = kernel.decode._model, list[int]()

    def interrupted(*arguments: Any) -> int:
        said: int = call(*arguments)
        done.append(c_int64.from_address(arguments[3]).value)
        signal.raise_signal(signal.SIGINT)
        return said

    with monkeypatch.context() as patch:
        patch.setattr(kernel.decode, "_model", interrupted)
        # A shell that runs the tests in the background has SIGINT ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            decode()
        signal.signal(signal.SIGINT, before)
    assert (done, cache.length) == ([1], 3)
    actual = decode()
    cache.length = 3
    with a_call_a_layer(model):
        assert torch.equal(decode(), actual)


PLANES = {"model": {"expert_bits": 4, "group_size": 32}}
PYTHON = "their kernel needs Python"


@pytest.mark.parametrize(
    ("architecture", "settings", "where"),
    [
        ("mixtral", {}, "inside"),
        ("gpt_oss", {}, "inside"),
        ("nemotron_h", {}, "inside"),
        ("gpt_oss", PLANES, "inside"),
        ("mixtral", {"kernels": {"backend": "reference"}}, f"outside: {PYTHON}"),
    ],
)
@torch.inference_mode()
def test_status_says_where_experts_run(
    architecture: str,
    settings: dict[str, Any],
    where: str,
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    model = MoE.from_pretrained(tiny_checkpoint(architecture), **settings)
    assert model.status()["fused"]["why"].endswith(f"; experts {where}")
    layers = asked(model)
    actual = decoded(model, [3, 9])
    assert len(layers) == len(model.experts.layers) * (4 if "outside" in where else 1)
    if where == "inside":
        with a_call_a_layer(model):
            expected = decoded(model, [3, 9])
        assert all(map(torch.equal, actual[0], expected[0]))
        assert actual[1] == expected[1]
