"""The same promises on GPUs: engine on one device, NCCL from another."""

from __future__ import annotations

import pytest
import torch
from helpers.gpu import GPUS, NEEDS_GPU, TOLERANCE, new_model, start
from helpers.log_probs import response_difference, score
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens

from torchrl_sglang import SGLangWeightSyncScheme, SGLangWrapper
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer

pytestmark = NEEDS_GPU


def difference(engine, model) -> float:
    """Greatest difference of the wrapper's log-probs from a model's."""
    prompts = [[5, 6, 7], [9] * 20]
    td = lazy_stack(
        [TensorDict(tokens=Tokens(prompt=torch.tensor(prompt))) for prompt in prompts]
    )
    wrapper = SGLangWrapper(
        engine,
        tokenizer=make_tiny_tokenizer(),
        input_mode="tokens",
        generate_kwargs={"max_new_tokens": 16, "prompt_logprobs": True},
    )
    out = wrapper(td)
    worst = 0.0
    for full, log_probs in zip(
        out.get(("tokens", "full"), as_list=True),
        out.get(("log_probs", "full"), as_list=True),
        strict=True,
    ):
        reference = score(model, full)[1:]
        worst = max(worst, float((log_probs[1:] - reference).abs().max()))
    return worst


def test_log_probs(gpu_engine):
    assert difference(gpu_engine, new_model(0)) < TOLERANCE


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.3},
        {"temperature": 3.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"frequency_penalty": 1.5, "presence_penalty": 1.0},
        {"repetition_penalty": 1.8},
        {"temperature": 0.5, "logit_bias": {"9": 5.0}, "min_new_tokens": 8},
    ],
    ids=", ".join,
)
def test_log_probs_are_the_models_own(gpu_engine, sampling):
    model = new_model(0)
    prompts = [[5, 6, 7, 8], [9] * 20, list(range(10, 60))]
    answers = gpu_engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": 32, "ignore_eos": True, **sampling},
        return_logprobs=True,
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 32
        assert answer.logprobs_mode == "model"
        assert response_difference(answer, prompt, model) < TOLERANCE


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_padded_tokens_are_scored_wherever_they_are(gpu_engine, device, masked):
    tokens = torch.tensor([[0, 0, 5, 6, 7], [5, 6, 7, 8, 9]], device=device)
    td = TensorDict(tokens=Tokens(full=tokens), batch_size=2)
    if masked:
        td["attention_mask"] = tokens != 0
    scorer = SGLangWrapper(
        gpu_engine,
        tokenizer=make_tiny_tokenizer(),
        input_mode="tokens",
        generate=False,
        pad_output=True,
    )
    scored = scorer(td)["log_probs", "full"].cpu()
    assert scored.shape == tokens.shape
    # The padding, and the first token of each row, which nothing comes before.
    assert scored[0, :3].eq(0).all()
    assert scored[1, 0] == 0
    model = new_model(0)
    for found, ids in ((scored[0, 3:], [5, 6, 7]), (scored[1, 1:], [5, 6, 7, 8, 9])):
        assert (found - score(model, ids)[1:]).abs().max() < TOLERANCE


def test_cuda_graphs_for_a_batch_of_training(gpu_model_path):
    with start(gpu_model_path, enforce_eager=False) as engine:
        size = torch.cuda.get_device_properties(0).total_memory
        if size > 60 * 2**30:
            assert engine.capabilities.graphs_up_to == 512
        assert difference(engine, new_model(0)) < TOLERANCE


@pytest.mark.skipif(GPUS < 2, reason="NCCL needs the trainer on a GPU of its own")
def test_nccl_broadcast(gpu_engine):
    scheme = SGLangWeightSyncScheme(gpu_engine, bucket_bytes=100_000)
    sender = scheme.create_sender()
    for seed in (3, 4):
        model = new_model(seed)
        assert difference(gpu_engine, model) > 0.1
        report = sender.update_weights(model)
        assert report.num_buckets > 1
        assert difference(gpu_engine, model) < TOLERANCE
    scheme.shutdown()
