"""Passes over token trees: the rows alone, and padded passes, are the oracles."""

from __future__ import annotations

import copy
import random
from itertools import chain

import pytest
import torch
from helpers.log_probs import score
from helpers.sampled_batches import Case, Row, make_batch
from llm.objectives.test_packing import (
    PACKING,
    adapted,
    checkpointed,
    make_model,
    padded,
)
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang import (
    CorrectedCISPOLoss,
    CorrectedGRPOLoss,
    CorrectedGSPOLoss,
    replay_routing,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.packing import can_share, packed_terms, prepare_packing
from torchrl_sglang.objectives.tree import (
    cut_tree,
    node_values,
    plan_tree,
    sorted_rows,
)
from torchrl_sglang.trainers.passes import count_computed

SEQUENCES = [
    [3, 4, 5, 6, 7, 8, 9, 10],
    [3, 4, 5, 6, 7, 8, 11],
    # Ends where others go on, and the same twice.
    [3, 4, 5],
    [3, 4, 5],
    [3, 4, 5, 6, 12, 13, 14, 15, 16],
    # Another tree, and a single token.
    [5, 4, 3],
    [20],
]
DISTINCT = 8 + 1 + 5 + 3 + 1


def random_rows(seed: int) -> list[list[int]]:
    """Returns sequences that fork at any place of earlier ones."""
    source = random.Random(seed)
    rows: list[list[int]] = []
    for _ in range(source.randint(1, 9)):
        stem = source.choice(rows) if rows and source.random() < 0.8 else []
        stem = stem[: source.randint(0, len(stem))]
        new = [source.randint(3, 8) for _ in range(source.randint(0, 9))]
        rows.append([*stem, *new] or [3])
    return rows


def prefixes(rows):
    return {tuple(row[: end + 1]) for row in rows for end in range(len(row))}


@pytest.mark.parametrize("seed", range(40))
def test_each_prefix_is_a_node_and_sees_its_prefix_alone(seed):
    rows = random_rows(seed)
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor(list(chain(*rows)))
    tree = plan_tree(ids.unsqueeze(-1), lengths)
    assert len(tree.nodes) == len(prefixes(rows))
    paths = tree.path_nodes.split(tree.paths.tolist())
    queries = torch.arange(len(tree.nodes)).split(tree.segments.tolist())
    seen = {}
    for path, segment in zip(paths, queries, strict=True):
        assert path[len(path) - len(segment) :].tolist() == segment.tolist()
        for place, node in enumerate(segment.tolist(), len(path) - len(segment)):
            seen[node] = tuple(ids[tree.nodes[path[: place + 1]]].tolist())
            assert tree.depths[node] == place
    nodes = tree.node_of.split(lengths.tolist())
    for row, of_row in zip(rows, nodes, strict=True):
        for end, node in enumerate(of_row.tolist()):
            assert seen[node] == tuple(row[: end + 1])


@pytest.mark.parametrize("seed", range(40))
def test_a_group_of_a_cut_has_no_more_distinct_tokens_than_the_limit(seed):
    rows = random_rows(seed)
    lengths = [len(row) for row in rows]
    order = sorted_rows([torch.tensor(row).unsqueeze(-1).numpy() for row in rows])
    shared = sum(common for _, common in order)
    assert sum(lengths) - shared == len(prefixes(rows))
    for limit in (1, 7, 12, 1000):
        groups = cut_tree(order, lengths, limit)
        assert sorted(chain(*groups)) == list(range(len(rows)))
        for group in groups:
            size = len(prefixes([rows[index] for index in group]))
            assert size <= limit or len(group) == 1
        computed = sum(len(prefixes([rows[i] for i in group])) for group in groups)
        assert count_computed(order, lengths, groups) == computed
    assert len(groups) == 1
    for least in range(1, len(rows) + 3):
        groups = cut_tree(order, lengths, 1000, least=least)
        assert len(groups) == min(least, len(rows))
        assert sorted(chain(*groups)) == list(range(len(rows)))


def counted(model):
    """Returns a list that gets the number of tokens of each pass."""
    seen = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: seen.append(inputs[0].numel())
    )
    return seen


def tensors(rows):
    sequences = [torch.tensor(row) for row in rows]
    return padded(sequences), padded([torch.ones_like(each) for each in sequences])


@pytest.mark.parametrize("kind", PACKING)
def test_log_probs_are_those_of_each_sequence_alone(kind):
    model = make_model(kind, PACKING[kind])
    expected = padded([score(model, row) for row in SEQUENCES])
    prepare_packing(model, "tree")
    seen = counted(model)
    tokens, real = tensors(SEQUENCES)
    with torch.no_grad():
        found = packed_terms(model, tokens, real, real, tree=True).log_prob
    assert seen == [DISTINCT]
    assert (found - expected).abs().max() < 1e-5


LOSSES = {
    "GRPO": (CorrectedGRPOLoss, {"clip_epsilon": 0.2}),
    "entropy and divergence": (
        CorrectedGRPOLoss,
        {"clip_epsilon": 0.2, "entropy_coeff": 0.3, "kl_to_inference_coeff": 0.2},
    ),
    "correction": (
        CorrectedGRPOLoss,
        {"clip_epsilon": 0.2, "correction": "bypass_pg_is"},
    ),
    "constant": (
        CorrectedGRPOLoss,
        {"clip_epsilon": 0.2, "aggregation": "constant", "max_tokens": 9},
    ),
    "CISPO": (CorrectedCISPOLoss, {"clip_epsilon": 0.2}),
    "GSPO": (CorrectedGSPOLoss, {}),
}


def sampled(rows, seed=0):
    """Returns a batch of sequences, each with a prompt of at most two tokens."""
    source = random.Random(seed)
    return make_batch(
        Case(
            [
                Row(
                    prompt=row[: min(2, len(row))],
                    tokens=row[2:],
                    rollout=[-source.random() * 3 for _ in row[2:]],
                    advantage=source.gauss(0, 1),
                    versions=[source.randint(0, 3) for _ in row[2:]],
                    train=[-source.random() for _ in row[2:]],
                )
                for row in rows
            ],
            torch.zeros(len(rows), max(map(len, rows)), 7, dtype=torch.float64),
        ),
        "ragged",
    )


def gradients_of(model, tokenizer, kind, arguments, packing, parts):
    own = copy.deepcopy(model)
    seen = counted(own)
    actor = TransformersWrapper(
        own, tokenizer=tokenizer, input_mode="tokens", generate=False
    )
    loss = kind(actor, packing=packing, **arguments)
    output = loss.accumulate(parts)
    found = {n: p.grad for n, p in own.named_parameters() if p.requires_grad}
    return found | output.to_tensordict(retain_none=False).to_dict(), seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", [None, 3, 5])
def test_every_loss_has_the_gradient_of_the_padded_pass(name, seed, tokenizer):
    kind, arguments = LOSSES[name]
    rows = SEQUENCES if seed is None else [*random_rows(seed), [3, 4, 5, 6], [3, 4, 5]]
    batch = sampled(rows)
    model = make_model("Qwen2", PACKING["Qwen2"], torch.float64)
    given = model, tokenizer, kind, arguments
    expected, _ = gradients_of(*given, False, [batch])
    found, seen = gradients_of(*given, "tree", [batch])
    # Rotary tables are float32, and padding moves positions.
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert seen == [len(prefixes(rows))]
    assert any(each.any() for each in expected.values())


@pytest.mark.filterwarnings("ignore")
def test_without_rotary_tables_the_gradient_is_exact(tokenizer):
    """Their positions are float32's last digits; learned positions have none."""
    model = make_model("GPT2", PACKING["GPT2"], torch.float64)
    given = model, tokenizer, *LOSSES["entropy and divergence"]
    batch = sampled(SEQUENCES)
    expected, _ = gradients_of(*given, True, [batch])
    found, _ = gradients_of(*given, "tree", [batch])
    for name, value in expected.items():
        scale = value.abs().max().clamp_min(1e-12)
        assert (found[name] - value).abs().max() / scale < 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Qwen3Moe", None),
        ("Mistral", None),
        ("Gemma3Text", None),
        ("Qwen2", checkpointed),
        ("Qwen2", adapted),
    ],
)
def test_models_have_the_gradient_of_the_padded_pass(kind, change, tokenizer):
    model = make_model(kind, PACKING[kind], torch.float64)
    model.set_experts_implementation("eager")
    model = model if change is None else change(model)
    given = model, tokenizer, *LOSSES["entropy and divergence"]
    batch = sampled(SEQUENCES)
    expected, _ = gradients_of(*given, False, batch.split(4))
    found, _ = gradients_of(*given, "tree", batch.split(4))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_tokens_with_other_experts_are_other_nodes():
    """As after an update, when another version of a router has chosen."""
    model = make_model("Qwen3Moe", PACKING["Qwen3Moe"])
    generator = torch.Generator().manual_seed(1)
    rows = [[3, 4, 5, 6], [3, 4, 5, 7], [3, 4, 5, 8]]
    shape = (len(rows[0]), 2, 2)
    same = torch.rand((*shape[:2], 4), generator=generator).argsort(-1)[..., :2]
    other = same.clone()
    other[1] = 3 - other[1]
    experts = [same, same, other]
    alone = []
    with replay_routing(model) as replay, torch.no_grad():
        for row, chosen in zip(rows, experts, strict=True):
            with replay.using(chosen.unsqueeze(0)):
                alone.append(score(model, row))
    prepare_packing(model, "tree")
    seen = counted(model)
    batch = sampled(rows)
    for row, chosen in zip(batch.unbind(0), experts, strict=True):
        row["routed_experts"] = {"full": chosen}
    tokens, real = tensors(rows)
    with replay_routing(model) as replay, torch.no_grad(), replay.using(batch):
        found = packed_terms(model, tokens, real, real, tree=True).log_prob
    assert (found - torch.stack(alone)).abs().max() < 1e-5
    assert (alone[0][:3] - alone[2][:3]).abs().max() > 1e-3
    assert seen == [4 + 1 + 3]


def test_hundreds_of_experts_of_a_token_take_little_memory():
    """Three kilobytes a token took seconds in each step, and gigabytes."""
    tokens = torch.tensor([5, 5, 5, -6])
    experts = torch.zeros(4, 48, 8, dtype=torch.int8)
    experts[1, 47, 7] = -1
    values = node_values(tokens, experts)
    assert values.nbytes == 4 * (8 + 2 * 48 * 8)
    same = (values[0] == values).all(-1)
    assert same.tolist() == [True, False, True, False]


@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_a_dropout_of_layers_is_seen(name):
    """Layers of OPT call the function, and have no module of dropout."""
    none = {"dropout": 0.0, "attention_dropout": 0.0}
    for rate in (0.0, 0.1):
        model = make_model("OPT", {**PACKING["OPT"], **none, name: rate})
        prepare_packing(model, "auto")
        assert can_share(model) is not bool(rate)


def test_models_that_cannot():
    model = make_model("Qwen2", PACKING["Qwen2"])
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigurationError, match="attention by 'flex_attention'; load"):
        prepare_packing(model, "tree")
    with pytest.raises(ConfigurationError, match="packing='tree' is not possible"):
        prepare_packing(make_model("Mamba", {}), "tree")
