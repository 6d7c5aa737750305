"""Fit the routers of a compressed model so that they choose as the original's did.

Compressed experts change the rows that the routers of later layers read, and some tokens then go to
other experts (*expert shift*, EAC-MoE). Here the compressed model reads a calibration's text with
the original's routing; each router's weights are then fitted, in closed form, so that the changed
rows give the logits of the original rows. EAC-MoE fits the logits of the original's first experts
only; we fit all, which preserves more choices and needs one solution instead of one for each
expert. A router keeps its weights if probing does not find it, or if the new ones choose no better
on held-out sequences. Legend: T tokens, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from moe.calibration.files import load_trace
from moe.commands.calibrate.compression import layer_path, load_layer
from moe.commands.calibrate.fit import HELD_OUT_EVERY
from moe.commands.calibrate.record import TeacherForcedExperts, record_trace
from moe.describe.routers import find_selectors
from moe.errors import CalibrationError
from moe.model import MoE
from moe.network.moe_layer import Selector

RIDGE = 0.01
"""Regularisation towards the old weights, as a share of the mean square of the inputs. From 0.001
to 0.1 the shipped model's routing agreement differs by less than 0.03 points."""
_AGREES = 0.99
"""Share of the original's choices that its router's weights must reproduce on the stored rows."""


@dataclass(frozen=True, eq=False)
class Repair:
    """The result for one router.

    Attributes:
        name: of its weight in the model; empty if the router was not recognised.
        weight: the new weight; None to keep the old one.
        before, after: share of the original's experts that are chosen on held-out text, with the
            old weights and with the new ones.
        reason: why the old weight is kept.
    """

    name: str
    weight: Tensor | None
    before: float
    after: float
    reason: str = ""

    def __str__(self) -> str:
        if self.weight is None:
            return f"left as it is: {self.reason}"
        return f"{self.before:.2%} of the original's experts are chosen, {self.after:.2%} repaired"


def repair_routers(
    network: nn.Module, store: Path, calibration: Path, on_notice: Callable[[str], object]
) -> None:
    """Put the routers' new weights into a network; the caller then rewrites the store's trunk.

    Args:
        network: with the trunk's weights, as they are in the store.
        store: a complete store; it is loaded as for serving.
        calibration: folder of ``moe calibrate --compression`` for the original.
        on_notice: called with a sentence about each router.

    Raises:
        CalibrationError: the calibration is absent, damaged, or another model's or version's.
        DoesNotFitError: there is no memory for the store.
    """
    parameters = dict(network.named_parameters())
    dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
    # Keys and values as the original's had when it was calibrated: only experts shall differ.
    model = MoE.from_pretrained(store, device="cpu", memory={"kv_bits": 32})
    repairs = repairs_of(model, calibration, dtypes)
    for layer, repair in enumerate(repairs):
        if repair.weight is not None:
            with torch.no_grad():
                parameters[repair.name].copy_(repair.weight)
        on_notice(f"router of MoE layer {layer}: {repair}")


@torch.inference_mode()
def repairs_of(model: MoE, calibration: Path, dtypes: Mapping[str, torch.dtype]) -> list[Repair]:
    """New weights for the router of each layer of a compressed model, which does not change.

    Args:
        dtypes: parameter name -> dtype in the store; weights are rounded to it.

    Raises:
        CalibrationError: see `repair_routers`.
    """
    experts = model.experts
    trace = load_trace(calibration, model.config, [layer.num_experts for layer in experts.layers])
    windows = [ids.tolist() for ids in trace.token_ids.split(trace.lengths)]
    found = find_selectors(model.backbone)
    rows = record_trace(
        model.backbone, TeacherForcedExperts(experts.layers, trace, experts.run), windows
    ).rows
    assert rows is not None
    sequence = torch.arange(len(windows)).repeat_interleave(torch.tensor(trace.lengths))
    aside = sequence[rows.tokens] % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    names = {own.data_ptr(): name for name, own in model.backbone.model.named_parameters()}
    repairs = []
    for layer, one in enumerate(found):
        inputs = load_layer(calibration, layer).inputs
        kept = trace.expert_ids[layer][rows.tokens]
        if not torch.equal(kept, inputs.expert_ids_TK):
            raise CalibrationError(
                f"{layer_path(calibration, layer)} has {len(inputs.expert_ids_TK)} rows that are "
                f"not those of the trace beside it ({len(kept)}); run moe calibrate again"
            )
        if one.selector is None:
            repairs.append(Repair("", None, 0.0, 0.0, one.reason))
            continue
        name = names[one.selector.weight.data_ptr()]
        pair = inputs.hidden_TH, rows.expert_inputs[layer]
        repairs.append(_repair(name, dtypes[name], one.selector, pair, kept, aside))
    return repairs


def _repair(
    name: str,
    dtype: torch.dtype,
    router: Selector,
    rows: tuple[Tensor, Tensor],
    chosen_TK: Tensor,
    aside_T: Tensor,
) -> Repair:
    """Fit one router; ``rows`` are its inputs in the original model and in the compressed one."""
    before_TH, after_TH = rows
    known = agreement(router, before_TH, chosen_TK)
    if known < _AGREES:
        return Repair(name, None, known, known, f"its weights give {known:.1%} of its own choices")
    weight = repaired(router.weight, before_TH[~aside_T], after_TH[~aside_T]).to(dtype)
    others = (after_TH[aside_T], chosen_TK[aside_T])
    old, new = (agreement(one, *others) for one in (router, replace(router, weight=weight)))
    if new < old:
        return Repair(name, None, old, old, f"new weights would choose worse ({new:.1%})")
    return Repair(name, weight, old, new)


def agreement(router: Selector, rows_TH: Tensor, chosen_TK: Tensor) -> float:
    """Share of the chosen experts, -1 for none, that a router chooses on these rows."""
    own_TK = router.select(router.scores(rows_TH)).expert_ids
    chosen_TK = chosen_TK.long()
    kept = (chosen_TK[:, :, None] == own_TK[:, None, :]).any(-1) & (chosen_TK >= 0)
    return float(kept.sum() / (chosen_TK >= 0).sum().clamp_min(1))


@torch.no_grad()
def repaired(weight_EH: Tensor, before_TH: Tensor, after_TH: Tensor) -> Tensor:
    """The fitted ``(E, H)`` weights, in the dtype of the old ones.

    Args:
        weight_EH: of the original router.
        before_TH: its inputs in the original model.
        after_TH: its inputs for the same tokens in the compressed model.
    """
    weight, before, after = (own.double() for own in (weight_EH, before_TH, after_TH))
    gram_HH = after.T @ after
    gram_HH.diagonal().add_(RIDGE * gram_HH.diagonal().mean() + 1e-30)
    moved_TE = (before - after) @ weight.T
    return (weight + torch.linalg.solve(gram_HH, after.T @ moved_TE).T).to(weight_EH.dtype)
