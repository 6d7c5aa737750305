"""What fell back or changes nothing, and why: one sentence each, for whoever loads a model."""

from __future__ import annotations

from moe.fused.enable import FUSED_OFF, Fused
from moe.loading.load import LoadReport
from moe.packing import Packing
from moe.profile import Profile
from moe.text.prompts import TextCodec
from offload.offloaded import Offloaded


def late_notices(offloaded: Offloaded | None, profile: Profile) -> list[str]:
    bits = profile.offload.late_bits
    if profile.offload.late != "prefix" or (offloaded is not None and offloaded.cache.prefixed):
        return []
    if offloaded is None:
        return ["offload.late: prefix changes nothing: all experts are in memory"]
    return [
        f"offload.late: prefix changes nothing: no expert has more than {bits} bits "
        "(offload.late_bits)"
    ]


def notices(packing: Packing, fused: Fused, codec: TextCodec, report: LoadReport) -> list[str]:
    made = []
    if not packing.enabled:
        made.append(
            "each sequence runs in a pass of its own, and prompts are neither cut nor kept for "
            f"others that begin alike: {packing.reason}"
        )
    if packing.enabled and not fused.enabled and fused is not FUSED_OFF:
        made.append(f"decode steps run through transformers' own layers: {fused.reason}")
    if codec.tokenizer is None:
        made.append(f"prompts can only be token ids: {codec.no_tokenizer_reason}")
    for names, what in (
        (report.ignored, "in the checkpoint are not used by this architecture"),
        (
            report.computed,
            "are not in the checkpoint and were filled by the architecture's own rule",
        ),
    ):
        if names:
            made.append(f"{len(names)} tensors {what} (the first: {names[0]})")
    return made
