"""Replay of routing on models of many families, against Hugging Face's own routers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.tiny_models import save_tiny_moe
from helpers.torchrun import run_ranks
from tensordict import LazyStackedTensorDict, TensorDict
from torch.nn.functional import pad
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_sglang import CorrectedGRPOLoss, OffPolicyCorrection, replay_routing
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer

PROGRAM = Path(__file__).with_name("routing_program.py")

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
EIGHT = {"num_experts": 8}
LOCAL = {"num_local_experts": 8}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES = {
    "qwen3_moe": {**EIGHT, "norm_topk_prob": True},
    "qwen2_moe": {**EIGHT, "shared_expert_intermediate_size": 32},
    "mixtral": LOCAL,
    "gpt_oss": LOCAL,
    "olmoe": EIGHT,
    "granitemoe": LOCAL,
    "minimax_m2": LOCAL,
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 16},
    "glm4_moe": {**ROUTED, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0},
    "qwen3_next": {
        **EIGHT,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    },
}
LENGTHS = (20, 13)


def make(name, **changes):
    config = AutoConfig.for_model(name, **{**SIZES, **FAMILIES[name], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model


def record(model, replay, ids):
    """Returns what Hugging Face's routers choose, by their own outputs."""
    shape = (ids.numel(), SIZES["num_hidden_layers"], 2)
    found = torch.full(shape, -1)

    def keep(router):
        def hook(module, inputs, output):
            (experts,) = (each for each in output if not each.is_floating_point())
            found[:, router.layer] = experts.reshape(ids.numel(), 2)

        return hook

    hooks = [r.module.register_forward_hook(keep(r)) for r in replay.routers]
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return found.view(*ids.shape, *shape[1:]), logits


@pytest.fixture
def ids():
    return torch.randint(3, 99, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, ids):
    """The same experts give the same bits, others are used, and routers are trained."""
    model = make(name)
    with replay_routing(model) as replay:
        experts, logits = record(model, replay, ids)
        chosen = experts[..., [r.layer for r in replay.routers], :]
        assert chosen.ge(0).all()
        with replay.using(experts), torch.no_grad():
            assert torch.equal(model(ids).logits, logits)
            # A server can report them in another order.
            with replay.using(experts.flip(-1).to(torch.int8)):
                assert torch.equal(model(ids).logits, logits)
        assert replay.flipped == 0
        others = torch.where(experts < 0, -1, (experts + 3) % 8)
        with replay.using(others):
            again, _ = record(model, replay, ids)
            assert torch.equal(again.sort(-1).values, others.sort(-1).values)
            output = model(ids).logits
        assert replay.flipped > 0.1
        assert not torch.allclose(output, logits, atol=1e-3)
        output.log_softmax(-1)[..., 5].sum().backward()
        for router in replay.routers:
            gradients = [each.grad for each in router.module.parameters()]
            assert any(g is not None and g.abs().sum() > 0 for g in gradients)
        # Left to the routers.
        with replay.using(torch.full_like(experts, -1)), torch.no_grad():
            assert torch.equal(model(ids).logits, logits)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    assert "forward" not in vars(replay.routers[0].module)


def make_batch(model, ids, *, dense=False):
    """Rows of other lengths, with experts that are not the model's own choice."""
    rows = []
    for row, length in zip(ids, LENGTHS, strict=True):
        experts = torch.randint(0, 7, (length, 3, 1)).to(torch.int8)
        experts = torch.cat([experts, experts + 1], -1)
        experts[-1] = -1
        rows.append(
            TensorDict(
                tokens={"full": row[:length]},
                masks={"all_attention_mask": torch.ones(length, dtype=torch.bool)},
                routed_experts={"full": experts},
            )
        )
    return LazyStackedTensorDict(*rows)


@torch.no_grad()
def alone(model, replay, batch):
    """Log-probs of each row's tokens, one row after the other."""
    found = []
    for row in batch.unbind(0):
        tokens = row["tokens", "full"]
        with replay.using(row["routed_experts", "full"][None]):
            logits = model(tokens[None]).logits[0]
        found.append(logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None]).squeeze())
    return found


def wrap(model, **arguments):
    return TransformersWrapper(
        model,
        tokenizer=make_tiny_tokenizer(),
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        **arguments,
    )


@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
def test_torchrl_s_wrapper(ids):
    """Rows travel with the tokens, padded on the left; the model's own are others."""
    model = make("qwen3_moe")
    batch = make_batch(model, ids)
    actor = wrap(model)
    plain = actor(batch.copy()).get(("log_probs", "full"), as_list=True)
    with replay_routing(actor) as replay:
        wanted = alone(model, replay, batch)
        found = actor(batch.copy()).get(("log_probs", "full"), as_list=True)
    for each, other, row in zip(found, plain, wanted, strict=True):
        torch.testing.assert_close(each[1:], row, atol=1e-4, rtol=1e-4)
        assert (each[1:] - other[1:]).abs().max() > 0.1


def test_one_row_without_padding(ids):
    """Sequences that follow one another have their experts, by their order."""
    model = make("qwen3_moe")
    batch = make_batch(model, ids)
    tokens = batch.get(("tokens", "full"), as_list=True)
    lengths = torch.tensor(LENGTHS)
    mask = torch.block_diag(*(torch.ones(n, n).tril() for n in LENGTHS)).bool()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    with replay_routing(model) as replay, torch.no_grad():
        wanted = alone(model, replay, batch)
        with replay.using(batch):
            logits = model(
                input_ids=torch.cat(tokens)[None],
                position_ids=positions[None],
                attention_mask=mask[None, None],
            ).logits[0]
        for part, row, want in zip(
            logits.split(lengths.tolist()), tokens, wanted, strict=True
        ):
            found = part.log_softmax(-1)[:-1].gather(-1, row[1:, None]).squeeze()
            torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("enabled", ["before", "inside"])
@pytest.mark.parametrize("backward", ["inside", "after"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(ids, reentrant, backward, enabled):
    """Each pass is computed again with its own experts, when others are set since."""
    model = make("qwen3_moe")
    batch = make_batch(model, ids)
    gradients = []

    def enable():
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()

    for checkpointing in (False, True):
        if checkpointing and enabled == "before":
            enable()
        with replay_routing(model) as replay:
            if checkpointing and enabled == "inside":
                enable()
            losses = []
            for row in batch.unbind(0):
                with replay.using(row["routed_experts", "full"][None]):
                    logits = model(row["tokens", "full"][None]).logits
                losses.append(logits.log_softmax(-1)[..., 5].sum())
            if backward == "inside":
                sum(losses).backward()
            counted = replay.flipped
        if backward == "after":
            sum(losses).backward()
        gradients.append([each.grad.clone() for each in model.parameters()])
        model.zero_grad()
    assert counted > 0.5
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
def test_an_adapter(ids):
    """PEFT's model replays, and its adapter has the gradient."""
    from peft import LoraConfig, get_peft_model

    model = make("qwen3_moe")
    batch = make_batch(model, ids)
    adapted = get_peft_model(
        model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    )
    actor = wrap(adapted)
    with replay_routing(actor) as replay:
        wanted = alone(adapted, replay, batch)
        with replay.using(batch):
            found = actor(batch.copy()).get(("log_probs", "full"), as_list=True)
        sum(each.sum() for each in found).backward()
    for each, row in zip(found, wanted, strict=True):
        torch.testing.assert_close(each[1:], row, atol=1e-4, rtol=1e-4)
    assert any(
        each.grad is not None and each.grad.abs().sum() > 0
        for each in adapted.parameters()
        if each.requires_grad
    )


class Plain(torch.nn.Module):
    """What is no mixture of experts."""


@pytest.fixture
def moe(ids):
    return make("qwen3_moe")


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (torch.zeros(2, 20, 2, 2, dtype=torch.int8), r"\(2, 20, 2, 2\).* has 3 layers"),
        (torch.zeros(2, 20, 3, 4, dtype=torch.int8), "chooses 2 experts"),
        (torch.zeros(2, 20, 3, 2), "float32 of shape"),
        (torch.zeros(2, 19, 3, 2, dtype=torch.int8), r"input_ids of \(2, 20\)"),
        (torch.full((2, 20, 3, 2), 8).char(), "expert 8, and the model has 8"),
        (TensorDict(tokens={"full": torch.zeros(2, 20)}, batch_size=2), "has no"),
    ],
)
def test_wrong_experts(moe, ids, experts, words):
    with (
        replay_routing(moe) as replay,
        pytest.raises(ConfigurationError, match=words),
        replay.using(experts),
    ):
        moe(ids)


def test_other_tokens(moe, ids):
    """Experts of other tokens, or of another order, are refused."""
    batch = make_batch(moe, ids)
    with (
        replay_routing(moe) as replay,
        pytest.raises(
            ConfigurationError, match="given 33 tokens, which are not the 33"
        ),
        replay.using(batch),
    ):
        moe(torch.cat(batch.get(("tokens", "full"), as_list=True)[::-1])[None])
    short = batch[0].clone()
    short["routed_experts", "full"] = short["routed_experts", "full"][:-1]
    with (
        replay_routing(moe) as replay,
        pytest.raises(ConfigurationError, match="of 19 tokens for a sequence of 20"),
        replay.using(short[None]),
    ):
        pass
    with (
        replay_routing(moe) as replay,
        replay.using(torch.zeros(1, 1, 3, 2, dtype=torch.int8)),
        pytest.raises(ConfigurationError, match="without input_ids"),
    ):
        moe(inputs_embeds=torch.zeros(1, 1, 64))


def test_models_that_cannot(moe):
    with (
        pytest.raises(ConfigurationError, match="Qwen2ForCausalLM has no routers"),
        replay_routing(make_tiny_model(make_tiny_tokenizer())),
    ):
        pass
    with pytest.raises(ConfigurationError, match="got str"), replay_routing("model"):
        pass
    with (
        replay_routing(moe),
        pytest.raises(ConfigurationError, match="replayed already"),
        replay_routing(moe),
    ):
        pass
    # A router that does not choose by topk.
    moe.model.layers[0].mlp.gate.forward = lambda hidden: (hidden, hidden, hidden)
    with (
        replay_routing(moe) as replay,
        replay.using(torch.zeros(1, 1, 3, 2, dtype=torch.int8)),
        pytest.raises(ConfigurationError, match="chose no 2 of 8 experts by topk"),
    ):
        moe(torch.zeros(1, 1, dtype=torch.long))


@pytest.mark.slow
def test_a_sharded_model(tmp_path):
    """FSDP2 over two ranks, with gradient checkpointing."""
    path = save_tiny_moe(tmp_path / "model", num_layers=2, num_experts=8)
    run_ranks(PROGRAM, path, folder=tmp_path)


def to_trained(batch, log_probs):
    """Adds what a loss reads: all but the first five tokens are the response."""
    rows = []
    for row, known in zip(batch.unbind(0), log_probs, strict=True):
        tokens = row["tokens", "full"]
        written = torch.arange(len(tokens)) >= 5
        full = torch.where(written, pad(known, (1, 0)), torch.nan)
        row["tokens", "prompt"] = tokens[:5]
        row["tokens", "response"] = tokens[5:]
        row["masks", "all_assistant_mask"] = written
        row["log_probs"] = TensorDict(full=full)
        row["advantage"] = torch.full((1, 1), 1.0 + len(rows))
        rows.append(row)
    return LazyStackedTensorDict(*rows)


def backward_by_hand(moe, replay, trained):
    """Writes the gradient of the first step, of the engine's experts."""
    terms = []
    for row in trained.unbind(0):
        tokens = row["tokens", "full"]
        with replay.using(row["routed_experts", "full"][None]):
            logits = moe(tokens[None]).logits[0]
        chosen = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])
        terms.append(row["advantage"] * chosen[4:])
    (-torch.cat(terms).mean()).backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [GRPOLoss, CorrectedGRPOLoss])
def test_losses(moe, ids, kind):
    """The gradient is that of the engine's experts, whole or in parts."""
    batch = make_batch(moe, ids)
    actor = wrap(moe)
    loss = kind(actor, entropy_bonus=False, masking_strategy="rlhf")
    parameters = [each for each in moe.parameters() if each.requires_grad]
    with replay_routing(actor) as replay:
        trained = to_trained(batch, alone(moe, replay, batch))
        backward_by_hand(moe, replay, trained)
        wanted = [each.grad.clone() for each in parameters]
        for split in (False, True) if kind is CorrectedGRPOLoss else (False,):
            moe.zero_grad()
            if split:
                output = loss.accumulate(trained.split(1))
            else:
                output = loss(trained)
                output.loss_objective.backward()
            assert abs(float(output.kl_approx)) < 1e-5
            for parameter, gradient in zip(parameters, wanted, strict=True):
                torch.testing.assert_close(
                    parameter.grad, gradient, atol=1e-5, rtol=1e-3
                )
        with pytest.raises(ConfigurationError, match="collect it with token_columns"):
            loss(trained.exclude("routed_experts"))
        rows = list(trained.unbind(0))
        rows[1] = rows[1].exclude("routed_experts")
        with pytest.raises(ConfigurationError, match=f"^1 of {len(rows)} rows have no"):
            loss(LazyStackedTensorDict(*rows))


@pytest.mark.filterwarnings("ignore:.*size_average")
@pytest.mark.parametrize("given", ["wrapper", "model"])
def test_the_correction_and_who_does_not_replay(moe, ids, given):
    batch = make_batch(moe, ids)
    actor = wrap(moe)
    correct = OffPolicyCorrection(
        "decoupled_token_is", actor_network=actor, masking_strategy="rlhf"
    )
    with replay_routing(moe if given == "model" else actor) as replay:
        trained = to_trained(batch, alone(moe, replay, batch))
        corrected = correct(trained)
    for row, known in zip(corrected.unbind(0), trained.unbind(0), strict=True):
        found, wanted = row["log_probs", "full"], known["log_probs", "full"]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0, equal_nan=True)
    if given == "model":
        loss = GRPOLoss(actor, entropy_bonus=False, masking_strategy="rlhf")
        with (
            pytest.warns(RuntimeWarning, match="none replayed experts"),
            replay_routing(moe),
        ):
            loss(trained)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_losses_with_and_without_padding(moe, ids, packing, checkpointing):
    batch = make_batch(moe, ids)
    actor = wrap(moe)
    loss = CorrectedGRPOLoss(
        actor, entropy_bonus=False, masking_strategy="rlhf", packing=packing
    )
    assert loss.packs is packing
    parameters = [each for each in moe.parameters() if each.requires_grad]
    with replay_routing(actor) as replay:
        trained = to_trained(batch, alone(moe, replay, batch))
        backward_by_hand(moe, replay, trained)
    wanted = [each.grad.clone() for each in parameters]
    moe.zero_grad()
    if checkpointing:
        moe.gradient_checkpointing_enable({"use_reentrant": False})
        moe.enable_input_require_grads()
        moe.train()
    with replay_routing(actor) as replay:
        output = loss.accumulate([trained])
        assert replay.flipped > 0.5
    assert abs(float(output.kl_approx)) < 1e-5
    for each, gradient in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(each.grad, gradient, atol=1e-5, rtol=1e-3)
