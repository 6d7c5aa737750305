"""Records that the C++ decode step reads and writes: of a description, and of a step's rows.

`DescriptionRecords` makes records of addresses and sizes that point into tensors of a
`Description`, and keeps those tensors. `CompiledPass` takes the rows of one step from one stop of
the C++ code to the next.
Legend: B rows, each one new token; H hidden, V vocabulary, K slots.
"""

from __future__ import annotations

from ctypes import addressof, c_int64
from typing import Any

import torch
from torch import Size, Tensor

from kernels.cpu import decode as native
from kernels.cpu.activation import Activation
from kernels.cpu.experts import plan_matrix
from kernels.cpu.interface import DTYPES
from kernels.cpu.streaming import LayerBuffers
from moe.decode.history import Latents
from moe.describe import description as d
from moe.describe.description import NotDescribed
from moe.describe.parts import describe_projection
from routing import Routing
from routing.routers import RouterRule
from routing.routing import UNUSED

_CURVES: dict[d.Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
_MAX_ROTATED = 1024
_MAX_GROUPS = 1024


class DescriptionRecords:
    """Makes records of a description's parts and keeps the tensors that they point to."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def layer(self, layer: d.Layer) -> native.DecoderLayerRecord:
        """A layer's record; raises `NotDescribed` for sizes or dtypes that C++ does not take."""
        record = native.DecoderLayerRecord(
            attention_norm=self.norm(layer.attention_norm),
            attention_post=self.norm(layer.attention_post_norm),
            feed_norm=self.norm(layer.feed_norm),
            feed_post=self.norm(layer.feed_post_norm),
            attention_scale=layer.attention_scale,
            feed_scale=layer.feed_scale,
            routed_scale=1.0,
            attention=self.latent(layer.attention)
            if isinstance(layer.attention, d.LatentAttention)
            else self._grouped(layer.attention),
            **dict.fromkeys(("router", "shared_gate", "gate", "up", "down"), _absent()),
        )
        feed = layer.feed
        mlp = feed.shared if isinstance(feed, d.Experts) else feed
        if mlp is not None:
            record.gate, record.up, record.down = map(self.matrix, (mlp.gate, mlp.up, mlp.down))
            record.activation = Activation(_CURVES[mlp.activation], 1.0, float("inf"), 0.0)
        if isinstance(feed, d.Experts):
            record.routed_scale = feed.scale
            if feed.shared_gate is not None:
                record.shared_gate = self.matrix(feed.shared_gate)
            if isinstance(feed.router, d.Router):
                record.router = self.matrix(feed.router.weight)
                record.rule = self._rule(feed.router.rule, feed.num_experts)
        return record

    def norm(self, norm: d.Norm | None) -> native.NormRecord:
        if norm is None:
            return native.NormRecord()
        weight, bias = self._floats(norm.weight), self._floats(norm.bias)
        return native.NormRecord(weight, bias, norm.eps, norm.centered)

    def matrix(self, projection: d.Projection | None) -> native.MatrixRecord:
        if projection is None:
            return _absent()
        weight, bias = projection.weight, self._floats(projection.bias)
        if not isinstance(weight, Tensor):
            plan = plan_matrix(weight)
            self._kept += [plan, weight]
            return native.MatrixRecord(plan.record, None, bias, native.BIT_PLANES)
        if weight.dtype not in DTYPES or weight.device.type != "cpu":
            raise NotDescribed(f"weights are {weight.dtype} on {weight.device}")
        weight = weight.contiguous()
        self._kept.append(weight)
        record = native.MatrixRecord(
            weight=weight.data_ptr(), bias=bias, format=DTYPES[weight.dtype]
        )
        record.planes.rows, record.planes.columns = weight.shape
        return record

    def _grouped(self, a: d.Attention) -> native.AttentionRecord:
        if {n.after_rotation for n in (a.q_norm, a.k_norm) if n and n.per_head} == {False, True}:
            raise NotDescribed("query and key norms come in different places")
        norms = [norm for norm in (a.q_norm, a.k_norm) if norm is not None]
        if any(norm.after_rotation and not norm.per_head for norm in norms):
            raise NotDescribed("a norm of all heads comes behind their rotation")
        record = native.AttentionRecord(
            **self._common(a),
            k=self.matrix(a.k), v=self.matrix(a.v), q_a=_absent(), kv_b=_absent(),
            kv_heads=a.kv_heads, head_dim=a.head_dim,
            norm_after_rotation=any(norm.after_rotation for norm in norms),
            rotation=self.rotation(a.rotation),
        )  # fmt: skip
        if a.q_norm is not None:
            record.q_norm, record.q_norm_per_head = self.norm(a.q_norm.norm), a.q_norm.per_head
        if a.k_norm is not None:
            record.k_norm, record.k_norm_per_head = self.norm(a.k_norm.norm), a.k_norm.per_head
        return record

    def latent(self, a: d.LatentAttention) -> native.AttentionRecord:
        return native.AttentionRecord(
            **self._common(a),
            k=self.matrix(a.kv_a), v=_absent(), q_a=self.matrix(a.q_a),
            kv_b=self.matrix(describe_projection(a.kv_b_leaf)),
            q_norm=self.norm(a.q_a_norm), k_norm=self.norm(a.kv_norm),
            **self._expansion(a.kv_b), latent=a.kv_b.shape[-1],
            kv_heads=1, head_dim=a.plain_dim + a.rotation.size, plain_dim=a.plain_dim,
            rotation=self.rotation(a.rotation),
        )  # fmt: skip

    def given_attention(
        self,
        cache: int,
        query: Size,
        key: Size,
        value: Size,
        view: d.View,
        latents: Latents | None,
        together: bool,
    ) -> native.AttentionRecord:
        """Attention of given queries ``(heads, D)``, keys ``(N, D)`` and values ``(N, V)``; where
        latents are expanded, of those and rotated keys ``(1, R + T)``, and the latter ``(1, T)``.

        Args:
            together: the new tokens of a prompt attend together.
        """
        expansion = None if latents is None else latents.expansion
        record = native.AttentionRecord(
            **dict.fromkeys(("q_a", "q", "k", "v", "o", "kv_b"), _absent()),
            cache=cache, heads=query[0], kv_heads=key[0], head_dim=query[1], value_dim=value[1],
            scale=view.scale, softcap=view.softcap or 0.0, window=view.span,
            sinks=self._floats(view.sinks), **self._expansion(expansion),
        )  # fmt: skip
        if latents is not None and expansion is not None:
            if together:
                record.kv_b = self.matrix(describe_projection(latents.leaf))
            record.latent, record.rotation.size = expansion.shape[2], value[1]
            record.plain_dim = query[1] - value[1]
            record.value_dim = expansion.shape[1] - record.plain_dim
        return record

    def heads(self, a: d.Attention) -> tuple[native.HeadsRecord, native.HeadsRecord]:
        """The norms and rotations of queries and of keys."""

        def of(head_norm: d.HeadNorm | None, count: int) -> native.HeadsRecord:
            norm = self.norm(None if head_norm is None else head_norm.norm)
            record = native.HeadsRecord(norm, self.rotation(a.rotation), count, a.head_dim)
            if head_norm is not None:
                record.per_head = head_norm.per_head
                record.after_rotation = head_norm.after_rotation
            return record

        return of(a.q_norm, a.heads), of(a.k_norm, a.kv_heads)

    def _common(self, a: d.Attention | d.LatentAttention) -> dict[str, Any]:
        view = a.view
        return {
            "q": self.matrix(a.q), "o": self.matrix(a.o), "cache": a.layer, "heads": a.heads,
            "value_dim": a.value_dim, "scale": view.scale, "softcap": view.softcap or 0.0,
            "window": view.span, "sinks": self._floats(view.sinks),
        }  # fmt: skip

    def rotation(self, rotation: d.Rotation | None) -> native.RotationRecord:
        """Without a rotation, one of no dimensions."""
        if rotation is None:
            return native.RotationRecord()
        if rotation.size > _MAX_ROTATED:
            raise NotDescribed(f"{rotation.size} dimensions are rotated")
        pairs = rotation.style != "half"
        record = native.RotationRecord(
            None, None, rotation.begin, rotation.size, pairs, rotation.style == "pairs"
        )
        point_to_table(record, rotation.table)
        return record

    def _rule(self, rule: RouterRule, num_experts: int) -> native.RouterRuleRecord:
        if rule.groups > _MAX_GROUPS:
            raise NotDescribed(f"experts come in {rule.groups} groups")
        return native.RouterRuleRecord(
            self._floats(rule.correction), num_experts, rule.top_k, rule.groups, rule.groups_kept,
            native.SCORES.index(rule.score), rule.group_score == "top2", rule.renormalise,
            rule.scale, rule.mixer_threshold,
        )  # fmt: skip

    def _expansion(self, weight: Tensor | None) -> dict[str, Any]:
        if weight is None or weight.dtype != torch.float16:
            return {"expansion": self._floats(weight), "half": False}
        self._kept.append(weight)
        return {"expansion": weight.data_ptr(), "half": True}

    def _floats(self, tensor: Tensor | None) -> int | None:
        """Address of a float32 copy, or of the tensor itself if it is float32."""
        if tensor is None:
            return None
        tensor = tensor.detach().float().contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def point_to_table(record: native.RotationRecord, table: d.RotaryTable) -> None:
    """Write a table's addresses into a rotation's record; again after it has grown."""
    record.cos, record.sin = table.cos.data_ptr(), table.sin.data_ptr()


def _absent() -> native.MatrixRecord:
    return native.MatrixRecord(format=native.ABSENT)


class CompiledPass:
    """One step's rows on their way through the layers; stops where Python has to run experts.

    Args:
        record: the rows, for C++.
        h_BH: what experts read, an address of the record.
        routed_BH: what experts give.
        logits_shape: B, or the rows whose logits are wanted, and V.
        moe_layers, top_k: the shape of expert ids and weights; these tensors are new in each step,
            so that routings may be kept.
        kept: what else the record points to.
        made: what else the rows make, for the step that made this pass.

    Attributes:
        done: layers that are done.
        ids_LBK: int64, of the MoE layers that have run and whose router C++ knows.
        logits_BV: filled when all are.
    """

    def __init__(
        self,
        kernel: native.NativeDecode,
        record: native.StepRecord,
        h_BH: Tensor,
        routed_BH: Tensor,
        logits_shape: tuple[int, int],
        moe_layers: int,
        top_k: int,
        kept: object,
        made: object = None,
    ) -> None:
        count = len(h_BH)
        self._kernel, self._record, self._kept = kernel, record, kept
        self.made = made
        self.h_BH, self._h = h_BH, h_BH.data_ptr()
        self._routed_BH = routed_BH
        self.logits_BV = torch.empty(logits_shape, dtype=torch.float32)
        self.ids_LBK = torch.empty(moe_layers, count, top_k, dtype=torch.int64)
        self._weights_LBK = torch.empty(moe_layers, count, top_k, dtype=torch.float32)
        self._done = c_int64(0)
        rows = (self._routed_BH, self.ids_LBK, self._weights_LBK, self.logits_BV)
        self._addresses = [tensor.data_ptr() for tensor in rows]

    @property
    def done(self) -> int:
        return self._done.value

    def go(self, model: native.ModelRecord, all_to_all: int | None = None) -> bool:
        """Run on from the layers that are done.

        Args:
            all_to_all: see `NativeDecode.model`.

        Returns:
            Whether it stopped at a layer that waits for its experts' rows.
        """
        record, own = addressof(self._record), self._addresses
        return self._kernel.model(record, model, all_to_all, self._done, *own)

    def give(self, rows_BH: Tensor | None) -> None:
        """The rows that the step waits for; None if they are already in `rows`."""
        if rows_BH is not None:
            self._routed_BH = rows_BH.contiguous()
            self._addresses[0] = self._routed_BH.data_ptr()
        self._done.value += 1

    def rows(self, moe_layer: int) -> LayerBuffers:
        """Input and output of an expert kernel at a layer whose router is known to C++."""
        routed, ids, weights, _ = self._addresses
        _, rows, top_k = self.ids_LBK.shape
        first = moe_layer * rows * top_k
        addresses = self._h, ids + 8 * first, weights + 4 * first, routed
        return LayerBuffers(*addresses, rows, top_k, self.h_BH.shape[1], self)

    def experts(self, moe_layer: int) -> list[int]:
        """The experts that a layer's router chose, ascending and distinct."""
        return sorted(set(self.ids_LBK[moe_layer].flatten().tolist()) - {UNUSED})

    def routing(self, moe_layer: int) -> Routing:
        """The decision of a router that is known to C++."""
        return Routing(self.ids_LBK[moe_layer], self._weights_LBK[moe_layer])
