"""Layouts that hand one checkpoint on, each to the next; jobs of 1, 2, 3 and 4 ranks run one after another."""

from __future__ import annotations

from typing import Any

_DISTRIBUTED = {"distributed": True}
_OVERLAPS = {**_DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}
_VPP = {"pipeline": 2, "virtual_pipeline": 2}
_TP_SP = {"tensor": 2, "sequence": True}

# chain -> (layout, ranks, its settings)
CHAINS: dict[str, list[tuple[str, int, dict[str, Any]]]] = {
    "plain": [
        ("serial", 1, {}),
        ("pp2_vpp2", 2, _VPP),
        ("cp2_gate2", 2, {"context": 2, "gate_group": 2}),
        ("tp2_sp_gate2", 2, {**_TP_SP, "gate_group": 2}),
        ("dp3_gate3", 3, {"gate_group": 3}),
        ("tp2_sp_dp2_gate4", 4, {**_TP_SP, "gate_group": 4}),
    ],
    "distributed": [
        ("serial", 1, _DISTRIBUTED),
        ("pp2_vpp2_overlaps", 2, {**_VPP, **_OVERLAPS}),
        ("cp2", 2, {"context": 2, **_DISTRIBUTED}),
        ("pp2", 2, {"pipeline": 2, **_DISTRIBUTED}),
        ("dp2_gate2_overlaps", 2, {"gate_group": 2, **_OVERLAPS}),
        ("dp3", 3, _DISTRIBUTED),
        ("dp3_gate3", 3, {"gate_group": 3, **_DISTRIBUTED}),
        ("dp4_gate2", 4, {"gate_group": 2, **_DISTRIBUTED}),
        ("pp2_tp2_gate2", 4, {"pipeline": 2, "tensor": 2, "gate_group": 2, **_DISTRIBUTED}),
    ],
}
