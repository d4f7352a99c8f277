"""Builds the language model. The only file that knows megatron-core's GPTModel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from egmla_megatron.attention.core_attention import choose_backend
from egmla_megatron.attention.gate_ids import GateIds, ids_of_one_rank
from egmla_megatron.attention.token_table import GateTable
from egmla_megatron.config.check_attention import equal_heads
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.to_mcore import transformer_config
from egmla_megatron.errors import UserError
from egmla_megatron.model.init import initialize_weights
from egmla_megatron.model.spec import block_spec, choose_implementation, choose_kernels
from egmla_megatron.parallel.world import World

__all__ = ["BuiltModel", "EGMLAModel", "build_model"]


class EGMLAModel(GPTModel):
    """GPTModel whose stage owns its layers' gating tables and hands the gate embeddings to the layers.

    Under an interleaved pipeline a stage is several of these, its chunks, each with the table of its own layers.

    Args:
        world: process groups; the gate group and its replicas place the table.
        total_layers: layers of the whole model.
        vp_stage: number of the chunk in its stage; None: the stage is one chunk.
        Others as GPTModel.
    """

    def __init__(
        self, config: Any, spec: Any, *, world: World, total_layers: int, vp_stage: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config, spec, pg_collection=world.groups, vp_stage=vp_stage, **kwargs)
        self.gate_table: GateTable | None = None
        if config.kv_emb_dim:
            self.gate_table = GateTable(
                config,
                vocab_size=self.vocab_size,
                num_layers=len(self.decoder.layers),
                layer_offset=get_transformer_layer_offset(config, vp_stage, world.groups.pp.rank()),
                total_layers=total_layers,
                group=world.gate,
                replicas=world.gate_replicas,
            )
            first = self.decoder.layers[0]
            first.self_attention.linear_kv_up_proj.before_gate = self.gate_table.wait

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        gate_ids: GateIds | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """ids [B,S] -> loss per token [B,S] with labels, else logits [B,S,vocab/TP] (last stage).

        Every stage needs the ids: its own tables are looked up here, with one exchange per micro-batch, which is
        started before the embedding. `gate_ids` are those of a `Batch`; None: every token is a row, found here.
        """
        if self.gate_table is not None:
            if gate_ids is None:
                gate_ids = ids_of_one_rank(input_ids, self.gate_table.group, self.config.gate_exchange)
            context = {"context": self.gate_table(gate_ids), "context_mask": gate_ids.row_map}
            kwargs["extra_block_kwargs"] = context
        return super().forward(input_ids, position_ids, attention_mask, **kwargs)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """labels [B,S], logits [S,B,vocab/TP] -> loss per token [B,S].

        As megatron-core's, but Transformer Engine's cross-entropy puts the gradient where the logits were, which nobody
        reads afterwards: megatron-core lets it copy them first.
        """
        if not (self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl == "te"):
            return super().compute_language_model_loss(labels, logits)
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        labels_SB, tp = labels.transpose(0, 1).contiguous(), self.pg_collection.tp
        loss_SB = parallel_cross_entropy(logits.contiguous(), labels_SB, dist_process_group=tp, overwrite_input=True)
        return loss_SB.transpose(0, 1).contiguous()


@dataclass(frozen=True)
class BuiltModel:
    """This rank's part of a model and what was chosen for it."""

    chunks: tuple[EGMLAModel, ...]  # in the order of their layers; one unless the pipeline is interleaved
    wrapped: tuple[nn.Module, ...]  # the chunks, or Float16Modules around them for bf16
    config: Any  # megatron-core transformer config; schedules read their hooks from it
    implementation: str  # te or torch
    attention_backend: str  # te_fused or an SDPA kernel
    kernels: str  # of gate and heads: triton or torch

    @property
    def module(self) -> EGMLAModel:
        """The only chunk."""
        (chunk,) = self.chunks
        return chunk


def _resolve_attention(cfg: RunConfig, implementation: str) -> tuple[str, str]:
    """(name to print, SDPA kernel for the torch core attention)."""
    wanted = cfg.parallel.attention_backend
    if implementation == "te":
        if wanted not in ("auto", "te_fused"):
            raise UserError(
                f"parallel.attention_backend: got {wanted!r} with Transformer Engine, allowed auto, te_fused; "
                "set parallel.implementation=torch to choose an SDPA kernel"
            )
        return "te_fused", "math"
    model = cfg.model
    kernel = choose_backend(
        wanted,
        cuda=torch.cuda.is_available(),
        precision=cfg.train.precision,
        equal_heads=equal_heads(model),
        dropout=model.attention_dropout > 0,
    )
    return kernel, kernel


def build_model(cfg: RunConfig, world: World) -> BuiltModel:
    """Build this rank's part of the model on its device, with layout-independent initial weights."""
    implementation = choose_implementation(cfg.parallel.implementation)
    if implementation == "te" and cfg.train.precision == "fp32":
        if cfg.parallel.implementation == "te":
            raise UserError(
                "train.precision: got fp32 with parallel.implementation=te, allowed bf16 (Transformer Engine has "
                "no fused fp32 attention); set parallel.implementation=torch"
            )
        implementation = "torch"
    if cfg.train.fp8 != "none" and implementation != "te":
        raise UserError(
            f"train.fp8: got {cfg.train.fp8} with layers of torch, allowed none (FP8 needs Transformer Engine and a "
            "GPU); set train.fp8=none"
        )
    backend, kernel = _resolve_attention(cfg, implementation)
    kernels = choose_kernels(cfg.parallel.kernels)
    config = transformer_config(cfg, implementation, kernel, triton=kernels == "triton")
    chunks = tuple(_build_chunk(cfg, world, config, implementation, index) for index in range(world.layout.vp))
    bf16 = cfg.train.precision == "bf16"
    wrapped = tuple(Float16Module(config, chunk) if bf16 else chunk for chunk in chunks)
    return BuiltModel(chunks, wrapped, config, implementation, backend, kernels)


def _build_chunk(cfg: RunConfig, world: World, config: Any, implementation: str, index: int) -> EGMLAModel:
    """Chunk `index` of this stage: megatron-core deals the layers out to all stages, then to all once more, ..."""
    last = world.layout.vp - 1
    vp_stage = index if last else None  # None is megatron-core's word for a pipeline that is not interleaved
    pp_rank = world.groups.pp.rank()
    chunk = EGMLAModel(
        config,
        block_spec(config, implementation, pp_rank, vp_stage),
        world=world,
        total_layers=cfg.model.num_layers,
        vp_stage=vp_stage,
        vocab_size=cfg.model.vocab_size,
        max_sequence_length=cfg.model.max_position_embeddings,
        pre_process=pp_rank == 0 and index == 0,
        post_process=world.is_last_stage and index == last,
        share_embeddings_and_output_weights=cfg.model.tie_word_embeddings,
        position_embedding_type="learned_absolute" if cfg.model.attention == "mha" else "rope",
        rotary_base=int(cfg.model.rope_theta),
    )
    chunk.to(device=world.device, dtype=config.params_dtype)
    initialize_weights(chunk, cfg.model, cfg.run.seed, world)
    return chunk
