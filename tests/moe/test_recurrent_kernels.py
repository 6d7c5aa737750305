"""Recurrent layers of packed passes run on our kernels, where those equal what they replace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, gelu, silu

from examples.models.tiny import tiny_config, tiny_model
from kernels import recurrence
from kernels.cpu import choose_kernel
from kernels.triton import recurrence as on_triton
from kernels.triton.language import INTERPRETED
from moe import MoE, SamplingParams
from moe.kv.cache import KVCache
from moe.network import recurrent_kernels
from moe.network.attention import packed_pass
from moe.network.packed_pass import PackedCache
from moe.network.recurrent_functions import FUNCTIONS
from moe.network.recurrent_kernels import use_kernels
from tests.amounts import deep_except

KINDS = {
    "qwen3_next": {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"},
    "kimi_linear": {"chunk_kda", "fused_recurrent_kda"},
    "granitemoehybrid": {"mamba_chunk_scan_combined", "selective_state_update"},
    "jamba": {"selective_scan_fn", "selective_state_update"},
    "lfm2_moe": set[str](),
}
_NUMBERS = count()
native, reason = choose_kernel()
pytestmark = pytest.mark.skipif(native is None, reason=reason)


def public(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers' decorator of functions that stand for those of other packages."""
    func_name = name

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        assert func_name
        return own(*args, **kwargs)

    return wrapped


@pytest.fixture
def source() -> Iterator[ModuleType]:
    """A modeling file of our own; its functions become globals."""
    name = f"modeling_of_test_{next(_NUMBERS)}"
    sys.modules[name] = ModuleType(name)
    yield sys.modules[name]
    del sys.modules[name]


def layer(source: ModuleType) -> nn.Module:
    return type("Layer", (nn.Module,), {"__module__": source.__name__})()


class Convolution:
    """What transformers has under this name; counts its calls."""

    def __init__(self, wrong: float = 0.0) -> None:
        self.calls, self._wrong = 0, wrong

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        self.calls += 1
        out = conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
        out = out[..., : x.shape[-1]] + self._wrong
        return out if activation is None else silu(out) if activation == "silu" else gelu(out)


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_transformers_are_replaced(kind: str) -> None:
    found = use_kernels(tiny_model(kind).modules())
    if not found:
        pytest.skip("this transformers has no functions of public names")
    assert found.keys() >= KINDS[kind] | {"causal_conv1d_fn", "causal_conv1d_update"}
    assert set(found.values()) == {""}


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: kernels need a GPU")
@pytest.mark.parametrize("kind", deep_except(["jamba"], KINDS))
def test_triton_equals_functions_of_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof that GPUs get, in Triton's interpreter."""
    monkeypatch.setitem(recurrence._kernels, "cpu", on_triton.run)
    sources = {type(module).__module__ for module in tiny_model(kind).modules()}
    functions = [own for source in sources for own in vars(sys.modules[source]).values()]
    found = dict[str, str]()
    for own in functions:
        public_name = recurrent_kernels._public_name(own)
        if public_name is not None:
            ours = FUNCTIONS[public_name]
            _, found[public_name] = recurrent_kernels._prove(own, ours, torch.device("cpu"))
    if not found:
        pytest.skip("this transformers has no functions of public names")
    assert found.keys() >= KINDS[kind]
    assert set(found.values()) == {""}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the proof on a GPU would succeed")
def test_each_type_of_device_has_its_own_proof(
    source: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Convolution()
    vars(source)["convolve"] = seam = public("causal_conv1d_fn", own)
    x, weight = torch.randn(1, 12, 30), torch.randn(12, 4)
    with monkeypatch.context() as patch:
        patch.setattr(recurrent_kernels, "_device", lambda _: torch.device("cuda"))
        assert "raised" in use_kernels([layer(source)])["causal_conv1d_fn"]  # no GPU here
        assert source.convolve is seam
        patch.setattr(recurrent_kernels, "enable_recurrence", lambda _: "not here")
        assert use_kernels([layer(source)]) == {"causal_conv1d_fn": "not here"}
    assert use_kernels([layer(source)]) == {"causal_conv1d_fn": ""}
    own.calls = 0
    with packed_pass(PackedCache([KVCache(10)], [1], set())):
        expected = source.convolve(x, weight)
        assert source.convolve(x.to("meta"), weight).shape == expected.shape
        assert own.calls == 0
        replaced = recurrent_kernels._seams[source.__name__, "convolve"]
        replaced.proven["cuda"] = replaced.proven.pop("cpu")  # as if on a GPU only
        assert source.convolve(x.to("meta"), weight.to("meta")).shape == expected.shape
        assert own.calls == 0
        assert (source.convolve(x, weight) - expected).abs().max() < 1e-5
        assert own.calls == 1


def test_only_packed_passes_run_on_them(source: ModuleType) -> None:
    own = Convolution()
    vars(source)["convolve"] = public("causal_conv1d_fn", own)
    assert use_kernels([layer(source)]) == {"causal_conv1d_fn": ""}
    x, weight = torch.randn(1, 12, 30), torch.randn(12, 4)
    own.calls = 0
    expected = source.convolve(x, weight)
    assert own.calls == 1
    with packed_pass(PackedCache([KVCache(10)], [1], set())):
        assert (source.convolve(x, weight) - expected).abs().max() < 1e-5
        assert own.calls == 1
        source.convolve(x, weight, activation="gelu")  # ours have no other curve than silu
        assert own.calls == 2
        source.convolve(x, weight, seq_idx=torch.zeros(1, 30))
        assert own.calls == 3


@pytest.mark.parametrize(
    ("own", "why"),
    [(Convolution(wrong=1e-2), "differs from transformers' own by"), (torch.neg, "raised Type")],
)
def test_a_function_that_we_do_not_equal_stays(
    source: ModuleType, own: Callable[..., Any], why: str
) -> None:
    vars(source)["convolve"] = seam = public("causal_conv1d_fn", own)
    found = use_kernels([layer(source)])
    assert why in found["causal_conv1d_fn"]
    assert source.convolve is seam
    assert use_kernels([layer(source)]) == found


def test_other_functions_stay(source: ModuleType) -> None:
    vars(source)["scan"] = seam = public("mamba_inner_fn", Convolution())
    vars(source)["causal_conv1d_fn"] = plain = Convolution()
    assert use_kernels([layer(source)]) == {}
    assert (source.scan, source.causal_conv1d_fn) == (seam, plain)


LARGE_STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 256,
        "mamba_expand": 16,
    },
}
"""Of half a MiB a sequence and layer."""


@pytest.mark.parametrize("kind", LARGE_STATES)
def test_states_that_exceed_the_caches_are_those_of_each_sequence_alone(
    kind: str, tmp_path: Path
) -> None:
    config = tiny_config(kind)
    for name, size in LARGE_STATES[kind].items():
        assert hasattr(config, name)
        setattr(config, name, size)
    tiny_model(kind, config=config).save_pretrained(tmp_path)
    model = MoE.from_pretrained(tmp_path, {"engine.max_batch_size": 17})
    settings = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True, logprobs=1)
    prompts = [[(7 * i * i + n) % 90 + 3 for i in range(3 + n % 5)] for n in range(17)]
    together = model.generate(prompts, settings)  # 8.5 MiB a layer: STREAMED_BYTES of linear.h
    for n in (0, 8, 16):
        (alone,) = model.generate([prompts[n]], settings)
        found, wanted = together[n].tokens, alone.tokens
        assert [token.id for token in found] == [token.id for token in wanted]
        torch.testing.assert_close(
            torch.tensor([token.logprob for token in found]),
            torch.tensor([token.logprob for token in wanted]),
            atol=1e-5,
            rtol=0,
        )
