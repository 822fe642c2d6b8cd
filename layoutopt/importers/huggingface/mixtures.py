"""Mixtures of experts of configured models, as records: the fields of their sizes, and their routing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layoutopt.importers.huggingface.fields import ConfiguredTraining, Fields
from layoutopt.importers.huggingface.forms import Mixture
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.dims import Dim

Blocks = list[Mixture | None]
"""The experts of each layer; None: it has none."""


@dataclass(frozen=True)
class Experts:
    """The experts of a family. The defaults are those of Qwen 3.

    Attributes:
      count, chosen, d_ff: fields of the number of experts, of those of a token, and of their hidden size.
      scores, normalized, groups: as of `TopExperts`; a name of `normalized` is a field.
      scale: the field of the factor of the gates.
      shared: the field of the hidden size of shared experts; "": none.
      shared_count: the field of how many of that size there are.
      shared_gate, gated, bias, activation, up, gates: as of `Mixture`; gates "": as of `ConfiguredTraining`.
      exact: the router multiplies in float32, and not in the type of activations.
      expert_scale: as of `TopExperts`; latent: the field of `Mixture.latent`.
      first: first layers without experts, where the file has no `first_k_dense_replace`; None: no such field.
      only: fields that may have no other values.
    """

    count: str = "num_experts"
    chosen: str = "num_experts_per_tok"
    d_ff: str = "moe_intermediate_size"
    scores: str = "softmax"
    normalized: bool | str = "norm_topk_prob"
    groups: bool = False
    scale: str = ""
    shared: str = ""
    shared_count: str = ""
    shared_gate: bool = False
    gated: bool = True
    bias: bool = False
    activation: str = ""
    up: str = "linear"
    gates: str = ""
    latent: str = ""
    exact: bool = False
    expert_scale: bool = False
    first: int | None = None
    only: Mapping[str, Sequence[object]] = field(default_factory=dict)

    def read(self, fields: Fields, training: ConfiguredTraining, act: str, layers: int) -> Blocks:
        """The experts of a configuration."""
        # Hugging Face's load-balance loss is over all layers together, and by default not used.
        fields.skip("router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "router_jitter_noise")
        fields.only("output_router_logits", False)
        for name, values in self.only.items():
            fields.only(name, *values)
        count = fields.count(fields.first(self.count, "num_local_experts"), least=0)
        if count < 1 + fields.has("expert_layer_period"):  # one expert of Jamba is none
            fields.skip(self.chosen, self.d_ff)
            return [None] * layers
        method = fields.raw("topk_method", "") if self.scores == "softmax" else ""
        grouped = self.groups and method != "greedy"
        router = nn.TopExperts(
            training.capacity_factor,
            imbalance=training.imbalance,
            chosen=fields.count(self.chosen, layers=layers),
            scores=self.scores,
            normalized=fields.either(self.normalized),
            scale=fields.positive(self.scale, 1.0) if self.scale and fields.has(self.scale) else 1.0,
            groups=fields.count("n_group", 1) if grouped and fields.has("n_group") else 1,
            groups_chosen=fields.count("topk_group", 1) if grouped and fields.has("topk_group") else 1,
            bias=self.bias,
            narrow=(training.router or ("float32" if self.exact else "model")) == "model",
            expert_scale=self.expert_scale,
        )
        if not grouped and self.groups:
            fields.skip("n_group", "topk_group")
        shared = fields.count(self.shared, 0, least=0) if self.shared and fields.has(self.shared) else 0
        if self.shared_count:
            shared *= fields.count(self.shared_count, least=0) if fields.has(self.shared_count) else 0
        block = Mixture(
            Dim("experts", count),
            Dim("d_expert", fields.count(self.d_ff)),
            router,
            self.activation or act,
            self.gated,
            shared=Dim("d_ff", shared) if shared else None,
            shared_gate=self.shared_gate and shared > 0,
            up=self.up,
            bias=self.bias,
            gates=self.gates or training.gates or "hidden",
            latent=fields.count(self.latent) if self.latent and fields.has(self.latent) else 0,
        )
        return [block if mixed else None for mixed in self._where(fields, layers)]

    def _where(self, fields: Fields, layers: int) -> Sequence[bool]:
        kinds = fields.listed("mlp_layer_types")
        frequency = fields.raw("moe_layer_freq")
        first = fields.count("first_k_dense_replace", self.first, least=0) if self.first is not None else 0
        for name, each in ("mlp_layer_types", kinds), ("moe_layer_freq", frequency):
            if isinstance(each, list) and each:
                if len(each) < layers:
                    raise fields.wrong(name, f"give one entry for each of the {layers} layers")
                return [i == "sparse" if each is kinds else bool(i) for i in each]
        steps = "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"
        step, plain = fields.count(fields.first(*steps), 1), fields.listed("mlp_only_layers")
        if listed := fields.listed("moe_layers") or re.findall(
            r"\d+", str(fields.raw("moe_layers_enum", ""))
        ):
            return [str(i) in map(str, listed) for i in range(layers)]
        if self.first is not None:
            fields.only("moe_layer_freq", 1)
            return [i >= first for i in range(layers)]
        if fields.has("expert_layer_period"):
            every, at = fields.count("expert_layer_period"), fields.count("expert_layer_offset", 1, least=0)
            return [i % every == at for i in range(layers)]
        begin = fields.count("moe_layer_start_index", 0, least=0)
        end = fields.count("moe_layer_end_index", -1, least=-1)
        some = range(begin, layers if end == -1 else end + 1)
        return [i not in plain and (i + 1) % step == 0 and i in some for i in range(layers)]


def limited(fields: Fields, limits: Mapping[str, str], own: str, act: str, number: int) -> tuple[str, str]:
    """The activations of the two products of a layer's gated block, as `Form.limits` bounds them."""
    bound = fields.raw(name := limits.get(own, ""))
    if isinstance(bound, list):
        bound = bound[number] if number < len(bound) else None
    if not bound:
        return act, "linear"
    if not isinstance(bound, int | float) or bound < 0:
        raise fields.wrong(name, "give a number of at least 0, or one for each layer")
    return f"{act} {limits['by']} {bound:g}", f"linear within {bound:g}"
