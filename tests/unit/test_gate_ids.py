"""What the members of a gate group plan separately fits together: every token finds the row of its id."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from egmla_megatron.attention.gate_ids import GatePlan, distinct_ids, padded_size
from egmla_megatron.attention.sum_by_row import unpack_row_map
from egmla_megatron.config.load import load_config
from egmla_megatron.data.batch import DataShare, batch_iterator
from egmla_megatron.data.dataset import build_datasets
from egmla_megatron.errors import UserError
from egmla_megatron.parallel.world import World
from tests.tiny import write_run

VOCAB = 97
# members of a group by what they read: alone, TP pair, DP pair, TP x DP, context shards, every rank its own
GROUPS = [
    [(0, 0)],
    [(0, 0), (0, 0)],
    [(0, 0), (1, 0)],
    [(2, 0), (2, 0), (3, 0), (3, 0)],
    [(0, 0), (0, 1), (1, 0), (1, 1)],
    [(rank, 0) for rank in range(8)],
]


@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("members", GROUPS)
def test_plans_of_a_group_fit_together(members: list[tuple[int, int]], exchange: str, unique: bool) -> None:
    generator = torch.Generator().manual_seed(len(members))
    tokens = {key: torch.randint(VOCAB, (3, 11), generator=generator) for key in members}
    tokens[members[0]] = torch.full((3, 11), VOCAB - 1)  # one member with a single id
    plans = [GatePlan(tuple(members), mine, exchange, unique, VOCAB).plan(tokens) for mine in range(len(members))]
    assert all(torch.equal(plan.lookup_R, plans[0].lookup_R) for plan in plans)
    if unique:  # as a captured graph pads them, to the sizes of a micro-batch with more distinct ids
        many = {key: torch.arange(33).view(3, 11) + 31 * index for index, key in enumerate(tokens)}
        largest = [GatePlan(tuple(members), mine, exchange, unique, 400).plan(many) for mine in range(len(members))]
        plans += [plan.grown(large.sizes, 33) for plan, large in zip(plans, largest, strict=True)]
        assert [plan.sizes for plan in plans[len(members) :]] == [plan.sizes for plan in largest]
    for mine, (key, plan) in enumerate(zip(members * 2, plans, strict=False)):
        mine %= len(members)
        rows = plan.lookup_R  # what an identity table would give for every row
        if exchange == "all_to_all":
            rows = rows.view(len(members), -1)[mine]
        rows = rows if plan.own_U is None else rows[plan.own_U]
        expected_T = tokens[key].t().reshape(-1)
        assert (plan.row_map is not None) == unique
        got_T = rows if plan.row_map is None else rows[plan.row_map[: len(expected_T)]]
        assert torch.equal(got_T, expected_T)


def test_padding_is_never_indexed_and_points_at_padding() -> None:
    tokens = {(0, 0): torch.tensor([[5, 7, 5, 9]]), (1, 0): torch.tensor([[1, 2, 3, 7]])}
    plan = GatePlan(((0, 0), (1, 0)), 0, "all_gather", True, VOCAB).plan(tokens)
    assert plan.lookup_R.tolist() == [1, 2, 3, 5, 7, 9, 0, 0]
    assert plan.own_U is not None and plan.own_U.tolist() == [3, 4, 5, 7, 7, 7, 7, 7]
    assert plan.row_map is not None
    index_T, order_T, starts_V = unpack_row_map(plan.row_map, 4)
    assert index_T.tolist() == [0, 1, 0, 2]
    assert order_T.tolist() == [0, 2, 1, 3]
    assert starts_V.tolist() == [0, 2, 3, 4, 4, 4, 4, 4, 4]
    plan = GatePlan(((0, 0), (1, 0)), 1, "all_to_all", True, VOCAB).plan(tokens)
    assert plan.lookup_R.tolist() == [5, 7, 9, 0, 0, 0, 0, 0, 1, 2, 3, 7, 0, 0, 0, 0]


def test_a_full_union_leaves_a_row_of_padding() -> None:
    tokens = {(0, 0): torch.arange(8)[None], (1, 0): torch.arange(8, 16)[None]}
    plan = GatePlan(((0, 0), (1, 0)), 0, "all_gather", True, VOCAB).plan(tokens)
    assert len(plan.lookup_R) == 24  # 16 would leave none


def test_sizes_take_few_values() -> None:
    sizes = {padded_size(rows, 8192) for rows in range(1600, 1900)}
    assert sizes == {1792, 2048}
    assert padded_size(1, 4) == 8 and padded_size(8192, 8192) == 8192


def test_distinct_ids_are_those_of_torch_unique() -> None:
    ids_N = torch.randint(VOCAB, (500,), generator=torch.Generator().manual_seed(1))
    expected = torch.unique(ids_N, return_inverse=True)
    assert all(map(torch.equal, distinct_ids(ids_N, VOCAB), expected))


@pytest.mark.parametrize("blend", [False, True])
def test_an_id_out_of_range_is_named_with_its_place(world: World, tmp_path: Path, blend: bool) -> None:
    path, _ = write_run(tmp_path, "run")
    prefix = str(tmp_path / "data" / "train")
    overrides = [f"data.train=[0.5,{prefix},0.5,{tmp_path / 'data' / 'valid'}]"] if blend else []
    cfg = load_config(path, overrides)
    dataset = build_datasets(cfg).train
    own = dataset.datasets[0] if blend else dataset
    number = next(n for n in range(len(dataset)) if not blend or dataset.dataset_index[n] == 0)
    sample = int(dataset.dataset_sample_index[number]) if blend else number
    text, documents, _ = own._query_document_sample_shuffle_indices(sample)
    largest = int(text.max())
    position = int((text == largest).argmax())
    share = DataShare(vocab_size=largest)  # the data has one id more
    chosen = [{0: [number]}]
    with pytest.raises(UserError) as caught:
        next(batch_iterator(dataset, chosen, torch.device("cpu"), num_workers=int(blend), share=share))
    message = str(caught.value)
    assert f"got token id {largest} ({prefix}, document " in message
    assert f"allowed 0 to {largest - 1} (model.vocab_size = {largest})" in message
    document, offset = (int(word.split()[-1]) for word in message.split("(")[1].split(")")[0].split(", ")[1:])
    assert document in documents
    assert own.dataset.get(document)[offset] == largest
    assert position < len(text)


def test_both_exchanges_of_a_token_table_need_no_plan(world: World) -> None:
    """Ids alone are enough for a model of one rank (inference)."""
    from egmla_megatron.attention.gate_ids import ids_of_one_rank

    ids_BS = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for exchange in ("all_to_all", "all_gather"):
        found = ids_of_one_rank(ids_BS, world.gate, exchange)
        assert found.lookup_R.tolist() == [1, 4, 2, 5, 3, 6]
        assert found.own_U is None and found.row_map is None
