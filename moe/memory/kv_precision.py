"""In how many bits keys and values are kept (`memory.kv_bits`), and why not in others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from kernels import backend_status
from kernels.triton import triton_status
from moe.errors import ProfileError
from moe.kv.cache import KVFormat, Shape
from moe.kv.host_blocks import kept_share
from moe.kv.visibility import InductionScores, KVPolicy, heads_without
from moe.settings import Profile


@dataclass(frozen=True)
class KVPrecision:
    """The precision of keys and values.

    Attributes:
        bits: of a number.
        why: what decided, for people.
        in_blocks: attention reads them in blocks; else they are in buffers of the network's dtype.
        policy: which blocks decode steps attend to; None: all.
        induction: of the model, as `moe calibrate` has measured them, for a policy by heads.
    """

    bits: int
    why: str
    in_blocks: bool
    policy: KVPolicy | None = None
    induction: InductionScores = field(default_factory=dict)

    @property
    def form(self) -> KVFormat:
        """The format of rows in a block."""
        selects = self.policy is not None and self.policy.selects
        return KVFormat.of_bits(self.bits, bounds=selects)

    def with_heads(self, shapes: Mapping[int, Shape]) -> KVPrecision:
        """The same where a policy by heads, if it is one, knows its heads.

        Args:
            shapes: of the layers of attention.

        Raises:
            ProfileError: the scores are of another model, or too few.
        """
        policy, induction = self.policy, self.induction
        heads = sum(map(len, induction.values()))
        if policy is None or not policy.by_heads:
            return self
        wanted = f"memory.kv_policy is {policy}"
        if not induction:
            raise ProfileError(
                f"{wanted}, and the model's calibration has not measured its key heads: run moe "
                "calibrate again, or set memory.kv_policy: null"
            )
        for layer, own in induction.items():
            if layer in shapes and shapes[layer].heads < len(own):
                raise ProfileError(
                    f"{wanted}, and layer {layer} attends with {len(own)} key heads but keeps rows "
                    f"of {shapes[layer].heads}, so that none can keep its own; set "
                    "memory.kv_policy: null"
                )
        seeing = {layer: shape for layer, shape in shapes.items() if layer in induction}
        known = {layer: shape.heads for layer, shape in seeing.items()}
        if known != {layer: len(own) for layer, own in induction.items()}:
            raise ProfileError(
                f"{wanted}, and the calibration is of other layers than the model's: run moe "
                "calibrate again, or set memory.kv_policy: null"
            )
        if policy.num_whole >= heads:
            raise ProfileError(
                f"{wanted}, and {heads} key heads see all tokens: let fewer of them keep all"
            )
        left = heads_without(induction, policy.num_whole)
        share = kept_share(self.form, seeing, left)
        return replace(self, policy=policy._replace(heads=left, share=share))

    def without_blocks(self, why: str) -> KVPrecision:
        """Return the precision of a float32 network whose decode step cannot be compiled."""
        return KVPrecision(32, why, in_blocks=False)

    def with_policy(self, proof: str) -> KVPrecision:
        """The same with what shows that the policy takes effect."""
        assert self.policy is not None
        name, tokens, num_whole = self.policy[:3]
        but = f", and with {num_whole} key heads to all" if num_whole else ""
        why = f"{self.why}; decode steps attend to {tokens} tokens by {name}{but}, {proof}"
        return replace(self, why=why)

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
    spec = profile.memory.kv_policy
    policy = None if spec is None else KVPolicy.of(spec)
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
    if profile.speculation.contrast:
        return "speculation.contrast keeps keys and values of its own"
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
