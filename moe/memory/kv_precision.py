"""In how many bits keys and values are kept (`memory.kv_bits`), and why not in others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kernels import backend_status
from kernels.triton import triton_status
from moe.hooks import readings, reads_again
from moe.kv.layout import KVFormat, Shape
from moe.kv.visibility import RowVisibility, visibility
from moe.settings import Profile


@dataclass(frozen=True)
class KVPrecision:
    """The precision of keys and values.

    Attributes:
        bits: of a number.
        why: what decided, for people.
        in_blocks: attention reads them in blocks; else they are in buffers of the network's dtype.
        policy: which blocks decode steps attend to; None: all.
    """

    bits: int
    why: str
    in_blocks: bool
    policy: RowVisibility | None = None

    @property
    def form(self) -> KVFormat:
        """The format of rows in a block."""
        bounds = self.policy is not None and self.policy.bounds
        return KVFormat.of_bits(self.bits, bounds=bounds)

    def for_layers(self, shapes: Mapping[int, Shape]) -> KVPrecision:
        """The same for a model with these layers of attention. Raises `ProfileError` if the policy
        is not for them."""
        policy = self.policy
        return (
            self if policy is None else replace(self, policy=policy.for_layers(shapes, self.form))
        )

    def without_blocks(self, why: str) -> KVPrecision:
        """Return the precision of a float32 network whose decode step cannot be compiled."""
        return KVPrecision(32, why, in_blocks=False)

    def with_policy(self, proof: str) -> KVPrecision:
        """The same with what shows that the policy takes effect."""
        assert self.policy is not None
        return replace(self, why=f"{self.why}; decode steps attend by {self.policy}, {proof}")

    def notice(self, profile: Profile) -> str:
        """Return a notice for a user who has asked for other bits; else empty."""
        wanted = profile.memory.kv_bits
        if wanted in ("auto", self.bits):
            return ""
        return f"keys and values have {self.bits} bits, not memory.kv_bits={wanted}: {self.why}"


def choose_kv_precision(
    profile: Profile, device: torch.device, dtype: torch.dtype, *, quantized: bool
) -> KVPrecision:
    """The precision that a profile asks for, or what the model gets in its place.

    Args:
        dtype: of the network, without its experts.
        quantized: the experts have fewer than 16 bits.
    """
    wanted, own = profile.memory.kv_bits, dtype.itemsize * 8
    policy = visibility(profile.memory.kv_policy)
    if reason := _why_buffers(profile, device, dtype):
        return KVPrecision(own, reason, in_blocks=False)
    if device.type != "cpu":
        why = f"on {device}, keys and values have the network's dtype"
        if policy is not None:  # loading refuses it with this reason
            why = f"on {device}, they read every block that a sequence lists"
        return KVPrecision(own, why, True)
    if wanted != "auto":
        return KVPrecision(wanted, "memory.kv_bits", True, policy)
    if quantized:
        return KVPrecision(16, "the experts are quantised", True, policy)
    return KVPrecision(32, "the experts are whole", True, policy)


def _why_buffers(profile: Profile, device: torch.device, dtype: torch.dtype) -> str:
    if readings(profile) > 1:
        return f"{reads_again(profile)} keeps keys and values of its own"
    if device.type != "cpu":
        status = triton_status()
        return "" if status["name"] == "triton" else status["reason"]
    if backend_status()["name"] != "native":
        return "the compiled kernels are not in use"
    if dtype != torch.float32:
        return f"the network is {dtype}, not float32"
    if profile.engine.fused == "off":
        return "engine.fused is off"
    return ""
