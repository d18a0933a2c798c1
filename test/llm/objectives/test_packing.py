"""Sequences in one row: Hugging Face's forward of each one alone is the oracle."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from helpers.log_probs import score
from helpers.sampled_batches import make_batch, make_case
from torch.nn.utils.rnn import pad_sequence
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang import CorrectedGRPOLoss
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives import token_kernels
from torchrl_sglang.objectives.attention import PACKED, packed_attention
from torchrl_sglang.objectives.packing import packed_terms, prepare_packing, why_padded

LENGTHS = (9, 3, 14, 1, 6)
COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

PACKING = {
    "Qwen2": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "Gemma3Text": {**GROUPED, "sliding_window": 4},
    "Qwen3Moe": {**GROUPED, **EXPERTS},
    "GPT2": {"n_positions": 64},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}
"""Other values of models' configurations: windows, experts, other positions."""

PADDING = {
    "no position_ids": ("Mamba", {}),
    "layers (conv) that go on": (
        "Lfm2",
        {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    ),
    "rope_type='longrope'": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
                "factor": 2.0,
            }
        },
    ),
    "'eager', which needs a mask": (
        "GptOss",
        {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "attention to later tokens": ("Bert", {}),
    "positions from its padding token's id": (
        "Camembert",
        {"is_decoder": True, "max_position_embeddings": 64},
    ),
    "rope_type='dynamic'": (
        "Gemma3Text",
        {
            **GROUPED,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "another attention than its own": ("Falcon", {}),
    "not tell its attention the size of its window": (
        "Phimoe",
        {**GROUPED, "num_local_experts": 2, "sliding_window": 4},
    ),
    "not tell its attention where sequences begin": ("StableLm", {}),
}


def make_model(kind, given, dtype=torch.float32):
    """Returns a model whose attention matters: its weights are large."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **given})
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model


def padded(rows, value=0):
    return pad_sequence(rows, True, value, "left")


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 99, (n,), generator=generator) for n in LENGTHS]


@pytest.mark.parametrize("kind", PACKING)
def test_log_probs_are_those_of_each_sequence_alone(kind, sequences):
    model = make_model(kind, PACKING[kind])
    expected = padded([score(model, each) for each in sequences])
    real = padded([torch.ones_like(each) for each in sequences])
    assert prepare_packing(model, "auto") == ""
    assert model.config._attn_implementation == PACKED
    with torch.no_grad():
        found = packed_terms(model, padded(sequences), real, real).log_prob
        # For rows that are not packed it is the attention that it was.
        again = padded([score(model, each) for each in sequences])
    assert (found - expected).abs().max() < 1e-5
    assert (again - expected).abs().max() < 1e-5


def test_the_sequences_would_see_each_other(sequences, monkeypatch):
    """The weights of these tests' models are such that it is noticed."""
    model = make_model("Qwen2", PACKING["Qwen2"])
    together = torch.cat(sequences)
    alone = torch.cat([score(model, each) for each in sequences])
    assert (score(model, together) - alone).abs().max() > 0.1


def test_the_router_sees_no_padding(sequences):
    model = make_model("Qwen3Moe", PACKING["Qwen3Moe"])
    prepare_packing(model, True)
    seen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda _, inputs, __: seen.append(inputs[0].view(-1, 32).shape[0])
        )
    real = padded([torch.ones_like(each) for each in sequences])
    packed_terms(model, padded(sequences), real, real)
    assert seen == [sum(LENGTHS)] * 2


@pytest.mark.parametrize("reason", PADDING)
def test_models_that_are_padded(reason, tokenizer):
    kind, given = PADDING[reason]
    model = make_model(kind, given)
    assert reason in why_padded(model)
    with pytest.raises(ConfigurationError, match="not possible"):
        prepare_packing(model, True)
    actor = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )
    loss = CorrectedGRPOLoss(actor, clip_epsilon=0.2)
    assert not loss.packs
    assert reason in loss.padded_because


def test_other_attentions_stay():
    model = make_model("Qwen2", PACKING["Qwen2"])
    model.config._attn_implementation = "flex_attention"
    assert prepare_packing(model, "auto") == ""
    assert model.config._attn_implementation == "flex_attention"
    with pytest.raises(ConfigurationError, match="'tree', True or False, got 'yes'"):
        prepare_packing(model, "yes")


def test_a_model_that_does_not_say_where_sequences_begin():
    """A silent pass of full attention would be the alternative."""
    q = torch.randn(1, 2, 5, 8)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(ConfigurationError, match="give packing=False"):
        packed_attention(torch.nn.Identity(), q, q, q, mask)


@pytest.mark.parametrize("packing", ["auto", "tree", False])
def test_a_load_balancing_loss_is_refused(packing):
    """It would be in no gradient, and a packed pass has no mask for it."""
    model = make_model(
        "Qwen3Moe", {**PACKING["Qwen3Moe"], "output_router_logits": True}
    )
    with pytest.raises(ConfigurationError, match="set model.config.output_router_log"):
        prepare_packing(model, packing)


def test_a_sequence_that_is_too_long(sequences):
    model = make_model("Qwen2", {"max_position_embeddings": 8})
    prepare_packing(model, True)
    real = padded([torch.ones_like(each) for each in sequences])
    with pytest.raises(ConfigurationError, match="14 tokens, .* positions for 8"):
        packed_terms(model, padded(sequences), real, real)


def make_loss(model, tokenizer, **arguments):
    actor = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )
    return CorrectedGRPOLoss(actor, clip_epsilon=0.2, **arguments)


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def adapted(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["sft", "rlhf"])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Qwen2", None),
        ("Qwen3Moe", None),
        ("Mistral", None),
        ("Qwen2", checkpointed),
        ("Qwen2", adapted),
    ],
)
def test_gradients_are_those_of_the_padded_pass(kind, change, strategy, tokenizer):
    """With entropy and divergences, whose gradients go through the logits, too."""
    batch = make_batch(make_case(4), "ragged")
    model = make_model(kind, PACKING[kind], torch.float64)
    # The others have no float64.
    model.set_experts_implementation("eager")
    found = []
    for packing in (False, True):
        own = copy.deepcopy(model)
        own = own if change is None else change(own)
        loss = make_loss(
            own,
            tokenizer,
            masking_strategy=strategy,
            packing=packing,
            entropy_coeff=0.3,
            kl_to_inference_coeff=0.2,
        )
        assert loss.packs is packing
        output = loss.accumulate(batch.split(2))
        gradients = {n: p.grad for n, p in own.named_parameters() if p.requires_grad}
        found.append(gradients | output.to_tensordict(retain_none=False).to_dict())
    expected, packed = found
    # Rotary embeddings are float32, and padding moves them.
    torch.testing.assert_close(packed, expected, atol=1e-6, rtol=1e-5)
    assert any(each.any() for each in expected.values())


def test_only_tokens_of_the_loss_have_logits_and_their_gradient_takes_no_memory(
    hf_model, tokenizer
):
    case = make_case(4)
    sizes, places = [], []

    def look(module, inputs, logits):
        sizes.append(tuple(logits.shape[:2]))
        places.append(logits.data_ptr())
        logits.register_hook(lambda gradient: places.append(gradient.data_ptr()))

    hf_model.lm_head.register_forward_hook(look)
    make_loss(hf_model, tokenizer).accumulate([make_batch(case, "ragged")])
    assert sizes == [(1, sum(len(row.tokens) for row in case.rows))]
    assert len(places) == 2
    assert places[0] == places[1]


def test_a_second_backward_is_refused_where_kernels_write_the_gradient(monkeypatch):
    """PyTorch does not see what a kernel of Triton writes, as here of ``.data``."""

    def forward(logits, tokens, scales):
        sums = logits.logsumexp(-1)
        return logits[torch.arange(len(tokens)), tokens] - sums, sums, sums

    def backward(logits, tokens, scales, sums, of_log_prob, of_entropy):
        logits.data.fill_(1.0)

    monkeypatch.setattr(token_kernels, "forward", forward)
    monkeypatch.setattr(token_kernels, "backward", backward)
    weight = torch.randn(3, 5, requires_grad=True)
    found, _ = token_kernels.fused_token_terms(
        weight * 2, torch.tensor([1, 0, 4]), None, entropy=False
    )
    found.sum().backward(retain_graph=True)
    assert torch.equal(weight.grad, torch.full((3, 5), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()
