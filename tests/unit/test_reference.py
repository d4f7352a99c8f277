"""The oracle against numbers worked out by hand, and the properties that the formula promises."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from egmla_megatron.attention.reference import ReferenceAttention, ReferenceModel, rotate_interleaved
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.errors import UserError

SMALL = ModelConfig(
    num_layers=2,
    hidden_size=10,
    num_attention_heads=2,
    intermediate_size=12,
    qk_nope_head_dim=3,
    qk_rope_head_dim=4,
    v_head_dim=5,
    kv_lora_rank=6,
    kv_emb_dim=7,
    vocab_size=13,
)
HAND = ModelConfig(
    num_layers=1,
    hidden_size=2,
    num_attention_heads=1,
    qk_nope_head_dim=1,
    qk_rope_head_dim=2,
    v_head_dim=1,
    kv_lora_rank=2,
    kv_emb_dim=1,
    vocab_size=3,
    rms_norm_eps=0.0,
    gate_norm_eps=0.0,
    gate_norm=False,
)


def hand_attention(model: ModelConfig) -> ReferenceAttention:
    """One head, weights that can be followed on paper.

    x = (a, b): q^C = a, q^R = (b, 0); latent c = (a, b), k^R = (a, 0); u = (c_0, c_1) after RMSNorm;
    gates of id i: (e_i, 2 e_i) with e = (1, 2, 3); y = (v, 0).
    """
    attention = ReferenceAttention(model)
    weights = {
        "q_proj": [[1, 0], [0, 1], [0, 0]],
        "kv_a_proj_with_mqa": [[1, 0], [0, 1], [1, 0], [0, 0]],
        "kv_b_proj": [[1, 0], [0, 1]],
        "gate_embed": [[1], [2], [3]],
        "gate_proj": [[1], [2]],
        "o_proj": [[1], [0]],
    }
    with torch.no_grad():
        for name, values in weights.items():
            getattr(attention, name).weight.copy_(torch.tensor(values))
    return attention


@pytest.mark.parametrize("gate", ["mul", "add"])
def test_two_tokens_by_hand(gate: Literal["mul", "add"]) -> None:
    attention = hand_attention(replace(HAND, gate=gate))
    x_BSD, ids_BS = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]]), torch.tensor([[1, 2]])
    # RMSNorm: (3, 4) / sqrt(12.5) and (1, 0) / sqrt(0.5); gates (2, 4) and (3, 6)
    u = [(3 / math.sqrt(12.5), 4 / math.sqrt(12.5)), (math.sqrt(2), 0.0)]
    gates = [(2.0, 4.0), (3.0, 6.0)]
    kv = [
        tuple(a * g if gate == "mul" else a + g for a, g in zip(*pair, strict=True))
        for pair in zip(u, gates, strict=True)
    ]
    # second query: q^C = 1, q^R = 0; scores on k^C alone, scale 1 / sqrt(1 + 2)
    weights = [math.exp(key / math.sqrt(3)) for key, _ in kv]
    second = sum(weight * value for weight, (_, value) in zip(weights, kv, strict=True)) / sum(weights)
    expected = torch.tensor([[[kv[0][1], 0.0], [second, 0.0]]])
    torch.testing.assert_close(attention(x_BSD, ids_BS), expected)


def test_rotary_score_by_hand() -> None:
    attention = hand_attention(HAND)
    x_BSD, ids_BS = torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), torch.tensor([[0, 0]])
    # second query: q^C = 0, q^R = (2, 0) turned by 1 rad; keys (3, 0) turned by 0 and (0, 0)
    weights = [math.exp(2 * 3 * math.cos(1.0) / math.sqrt(3)), 1.0]
    values = [2 * 4 / math.sqrt(12.5), 2 * math.sqrt(2)]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert attention(x_BSD, ids_BS)[0, 1, 0].item() == pytest.approx(expected, rel=1e-6)


def test_gate_norm_spans_all_heads() -> None:
    attention = ReferenceAttention(SMALL).double()
    kv_BSU = attention.gated_kv(torch.randn(1, 4, 6).double(), torch.tensor([[1, 2, 3, 4]]))
    assert kv_BSU.shape == (1, 4, 16)
    torch.testing.assert_close(kv_BSU.mean(-1), torch.zeros(1, 4).double(), atol=1e-9, rtol=0)
    per_head = kv_BSU.unflatten(-1, (2, 8)).mean(-1)
    assert per_head.abs().max() > 1e-3  # not normed head by head


def test_rotation_pairs_neighbours_and_scores_depend_on_distance_only() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 1.0]).view(1, 1, 1, 4)
    turned = rotate_interleaved(x, 100.0, torch.tensor([[2]])).flatten()
    expected = [math.cos(2), math.sin(2), -math.sin(0.2), math.cos(0.2)]
    torch.testing.assert_close(turned, torch.tensor(expected))
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(q_at: int, k_at: int) -> Tensor:
        turned_q, turned_k = (rotate_interleaved(x, 1e4, torch.tensor([[at]])) for x, at in ((q, q_at), (k, k_at)))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100))
    assert not torch.isclose(score(7, 3), score(7, 4))


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        replace(SMALL, gate="none", kv_emb_dim=0),
        replace(SMALL, q_lora_rank=3),
        replace(SMALL, attention="mha", gate="none", kv_emb_dim=0),
    ],
    ids=["mul", "mla", "q_lora", "mha"],
)
def test_later_tokens_do_not_change_earlier_logits(model: ModelConfig) -> None:
    torch.manual_seed(0)
    reference = ReferenceModel(model)
    ids = torch.randint(13, (2, 9))
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 13
    before, after = reference(ids), reference(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_gate_reads_the_token_id() -> None:
    torch.manual_seed(0)
    attention = ReferenceAttention(SMALL)
    x_BSD = torch.randn(1, 3, 10)
    first = attention(x_BSD, torch.tensor([[1, 2, 3]]))
    assert not torch.allclose(first, attention(x_BSD, torch.tensor([[1, 2, 4]])))
    plain = ReferenceAttention(replace(SMALL, gate="none", kv_emb_dim=0))
    assert torch.equal(plain(x_BSD, torch.tensor([[1, 2, 3]])), plain(x_BSD, torch.tensor([[1, 2, 4]])))


def test_initial_gates_have_unit_scale_and_layer_groups_are_refused() -> None:
    torch.manual_seed(0)
    model = replace(SMALL, kv_emb_dim=64, vocab_size=500, gate_table_init_std=0.1)
    attention: Any = ReferenceModel(model).model.layers[0].self_attn
    gates = attention.gate_proj(attention.gate_embed(torch.arange(500)))
    assert gates.std().item() == pytest.approx(1, abs=0.15)
    with pytest.raises(UserError, match="kv_group_size: got 2, allowed 1"):
        ReferenceModel(replace(SMALL, kv_group_size=2))
