"""Routing of a mixture of experts in half precision, with replay and without."""

from __future__ import annotations

import pytest
import torch
from helpers.gpu import NEEDS_GPU, start
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from torchrl_sglang import replay_routing
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer

pytestmark = NEEDS_GPU

LAYERS, CHOSEN, PROMPT, LENGTH = 4, 4, 32, 128


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tokenizer, folder = make_tiny_tokenizer(), tmp_path_factory.mktemp("moe")
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_engine_s_experts(path):
    """Nearly all are the model's own; with the rest, log-probs are nearer, too."""
    prompts = torch.randint(3, 90, (8, PROMPT)).tolist()
    with start(path, enable_return_routed_experts=True) as engine:
        completions = engine.generate(
            input_ids=prompts,
            sampling_params={"max_new_tokens": LENGTH, "ignore_eos": True},
            return_logprobs=True,
            token_columns=["routed_experts"],
        )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.to("cuda:0").eval()
    gaps: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    with replay_routing(model) as replay, torch.no_grad():
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = torch.tensor([*prompt, *completion.token_ids], device="cuda:0")
            both = completion.prompt_columns, completion.columns
            experts = torch.cat(
                [torch.from_numpy(each["routed_experts"].values) for each in both]
            )
            assert experts.shape == (PROMPT + LENGTH, LAYERS, CHOSEN)
            assert experts[:-1].ge(0).all()
            assert experts[-1].eq(-1).all()
            own = model(tokens[None]).logits[0]
            with replay.using(experts[None]):
                replayed = model(tokens[None]).logits[0]
            for kind, logits in ((False, own), (True, replayed)):
                found = logits.float().log_softmax(-1)[:-1].gather(-1, tokens[1:, None])
                found = found[-LENGTH:, 0].cpu() - torch.tensor(completion.log_probs)
                gaps[kind].append(found)
        assert 0 < replay.flipped < 0.2
    means = {kind: torch.cat(each).abs().mean() for kind, each in gaps.items()}
    assert means[True] < means[False]
