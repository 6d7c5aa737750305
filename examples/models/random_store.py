"""Random models that are written straight as a 4-bit store.

    python -m examples.models.random_store

`random_30b` has Qwen3-30B-A3B's true shape, in 17 GB: 48 layers of 128 experts, hidden size 2048,
expert width 768, top-8: 30.5 billion parameters, of which a few layers' planes are in memory at a
time. A few experts are drawn and quantised by the rules of `moe convert`; all others have the same
codes in another order. `random_latent`, in 1 GB, has latent attention: heads, latents and rotated
keys as large as DeepSeek-V2-Lite's, the rest as in `examples.models.random_models`. Like the models
there they say nothing sensible, and their routing has no locality. Skipped, with a notice, where
the disk is short.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

from examples.models.random_models import bench_dir, tokenizer
from experts.layer_file import layer_record, write_layer
from experts.linear import QuantizedLinear
from experts.manifest import (
    TRUNK_NAME,
    Bits,
    Manifest,
    MoELayerRecord,
    StoreError,
    read_manifest,
    write_manifest,
)
from experts.safetensors_io import Entry, FileRecord, write_file
from experts.weights import quantize_experts
from kernels import ExpertWeights, QuantizedExperts
from kernels.reference import AnyExperts
from moe.loading.meta_model import build_meta_model
from moe.loading.takeover import chosen_linears, prefixes_of, quantize_linear
from moe.network.seam import experts_modules, take_weights

SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
}
NBYTES = 17_200_000_000
LATENT: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
LATENT_NBYTES = 1_100_000_000
BITS: Final = 4
GROUP_SIZE: Final = 64
POOL = 4
"""Experts that are drawn and quantized."""
STD = 0.02
SMALL = 0.1
"""Attention outputs are scaled down by this, and embeddings have variance 1: otherwise attention
drowns the token after some layers, and all tokens of a text go to the same experts."""
WRITERS = 3
"""Layers that are made and written at the same time."""
VECTOR = 64
"""Bytes of a plane that kernels read together; planes stay valid in any order of these."""


def random_30b() -> Path | None:
    """Directory of the store, made at the first call. None, and the reason printed, if the disk is
    short."""
    return _random_store("random-30b-4bit", Qwen3MoeConfig(**SHAPE, dtype=torch.bfloat16), NBYTES)


def random_latent() -> Path | None:
    """As `random_30b`."""
    config = DeepseekV3Config(**LATENT, dtype=torch.bfloat16)
    return _random_store("random-latent-4bit", config, LATENT_NBYTES)


def _random_store(name: str, config: PreTrainedConfig, nbytes: int) -> Path | None:
    folder = bench_dir() / name
    if is_readable(folder):
        return folder
    free = shutil.disk_usage(folder.parent).free
    if free < 1.05 * nbytes:
        print(f"skipped: {name} needs {nbytes / 1e9:.0f} GB of disk, not {free / 1e9:.0f}")
        return None
    return write_random_store(config, folder)


def is_readable(store: Path) -> bool:
    """Return whether there is a store that this version reads; one that it cannot read is
    removed."""
    try:
        read_manifest(store)
    except StoreError:
        shutil.rmtree(store, ignore_errors=True)
        return False
    return True


def write_random_store(config: PreTrainedConfig, folder: Path, bits: Bits = BITS) -> Path:
    """A store of random weights, layer by layer; the directory gets its name last.

    Args:
        bits: of experts and trunk; 16: whole weights, in the configuration's dtype.

    Raises:
        OSError: the disk is full or fails.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(30)
    network = build_meta_model(config)
    layers = list(_write_layers(network, unfinished, bits))
    for name, own in chosen_linears(network, bits, bits).items():
        quantize_linear(network, name, GROUP_SIZE, own)
    trunk = _write_trunk(network, unfinished)
    config.save_pretrained(unfinished)
    tokenizer(config.vocab_size).save_pretrained(unfinished)
    manifest = Manifest(
        source=folder.name,
        bits=bits,
        group_size=GROUP_SIZE,
        linears=prefixes_of(network),
        layers=tuple(layer for layer, _ in layers),
        files={layer.file: file for layer, file in layers} | {TRUNK_NAME: trunk},
    )
    write_manifest(unfinished, manifest)
    return unfinished.rename(folder)


def _write_layers(
    network: PreTrainedModel, folder: Path, bits: Bits
) -> Iterator[tuple[MoELayerRecord, FileRecord]]:
    named = [(name, take_weights(module)) for name, module in experts_modules(network)]
    pool = _Pool.draw(named[0][1], bits)
    interleaved = isinstance(pool.experts, QuantizedExperts) and pool.experts.interleaved

    def write(index: int) -> tuple[MoELayerRecord, FileRecord]:
        name, like = named[index]
        record = layer_record(index, name, like, interleaved)
        return record, write_layer(folder, index, record, pool.layer(like.num_experts, seed=index))

    with ThreadPoolExecutor(WRITERS) as threads:  # checksums take most of the time
        yield from threads.map(write, range(len(named)))


@dataclass(frozen=True)
class _Pool:
    """A few experts, from which all others are made."""

    experts: AnyExperts

    @classmethod
    def draw(cls, like: ExpertWeights, bits: Bits) -> _Pool:
        rows, hidden = like.gate_up_EGH.shape[1:]
        first = torch.randn(POOL, rows, hidden) * STD
        second = torch.randn(POOL, hidden, like.intermediate_size) * STD
        whole = replace(like, gate_up_EGH=first, down_EHF=second)
        if bits == 16:
            dtype = like.gate_up_EGH.dtype
            return cls(replace(whole, gate_up_EGH=first.to(dtype), down_EHF=second.to(dtype)))
        return cls(quantize_experts(whole, GROUP_SIZE, bits))

    def layer(self, count: int, seed: int) -> AnyExperts:
        """``count`` experts, each one of the pool with its vectors in another order."""
        own = self.experts
        if isinstance(own, ExpertWeights):
            rows = torch.arange(count) % POOL
            return replace(own, gate_up_EGH=own.gate_up_EGH[rows], down_EHF=own.down_EHF[rows])
        planes, scales = [], []
        drawn = torch.Generator().manual_seed(seed)
        for _ in range(count):
            one, by = (int(torch.randint(high, (1,), generator=drawn)) for high in (POOL, 1 << 20))
            planes.append(tuple(plane.roll(by * VECTOR) for plane in own.planes[one]))
            scales.append(own.scales[one])
        return replace(own, planes=tuple(planes), scales=tuple(scales))


def _write_trunk(network: PreTrainedModel, folder: Path) -> FileRecord:
    state = network.state_dict()
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()]
    return write_file(folder / TRUNK_NAME, entries, _trunk_tensors(network, state))


def _trunk_tensors(network: PreTrainedModel, state: dict[str, Tensor]) -> Iterator[Tensor]:
    """Random values of every tensor, in order; one linear layer is in memory at a time."""
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parent = name.rpartition(".")[0]
        module = network.get_submodule(parent)
        if isinstance(module, QuantizedLinear):
            if name not in made:
                linear = nn.Linear(module.in_features, module.out_features, bias=False)
                nn.init.normal_(linear.weight, std=STD * (SMALL if "o_proj" in parent else 1))
                planes = QuantizedLinear.of(linear, GROUP_SIZE, module.bits).state_dict()
                made = {f"{parent}.{key}": value for key, value in planes.items()}
            yield made[name]
        elif tensor.dim() == 1:
            yield torch.ones(tensor.shape, dtype=tensor.dtype)
        else:
            std = 1.0 if isinstance(module, nn.Embedding) else STD
            std *= SMALL if "o_proj" in parent else 1
            yield torch.randn(tensor.shape, dtype=tensor.dtype) * std


if __name__ == "__main__":
    print(random_latent(), random_30b())
