"""Log-probs are the model's own on a GPU, too, whatever the sampling parameters.

Run with ``pytest -m gpu`` where a Python with CUDA has both sglang and this package.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.llm.policies import Masks, Tokens

from torchrl_sglang import AsyncSGLang, SGLangWrapper
from torchrl_sglang.testing.gpu import server_arguments
from torchrl_sglang.testing.tiny_model import (
    make_tiny_model,
    make_tiny_tokenizer,
    save_tiny_model,
)

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(GPUS == 0, reason="there is no CUDA device"),
]

# SGLang's CUDA kernels take half precision only, whose rounding the tolerance allows
# for. The sampling parameters below change the sampled distribution by over 0.3.
MODEL = {
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_range": 0.05,
    "dtype": torch.bfloat16,
}
TOLERANCE = 0.05
PROMPTS = [[5, 6, 7, 8], [9] * 20, list(range(10, 60))]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu_log_probs") / "model"
    with AsyncSGLang.from_pretrained(
        str(save_tiny_model(folder, **MODEL)),
        device="cuda",
        base_gpu_id=GPUS - 1,
        dtype=torch.bfloat16,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        start_timeout=300,
        **server_arguments(),
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def model():
    return make_tiny_model(make_tiny_tokenizer(), seed=0, **MODEL).to("cuda:0")


@torch.no_grad()
def expected(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    ids = torch.tensor(prompt + response, device="cuda:0")
    log_probs = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(-1, ids[1:, None])[len(prompt) - 1 :, 0].cpu()


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
def test_log_probs_are_the_models_own(engine, model, sampling):
    answers = engine.generate(
        input_ids=PROMPTS,
        sampling_params={"max_new_tokens": 32, "ignore_eos": True, **sampling},
        return_logprobs=True,
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.token_ids) == 32
        assert answer.logprobs_mode == "model"
        reference = expected(model, prompt, answer.token_ids)
        error = (torch.tensor(answer.log_probs) - reference).abs().max()
        assert error < TOLERANCE


def test_padded_tokens_on_the_gpu_are_scored_where_they_are(engine, model):
    width = max(map(len, PROMPTS))
    full = torch.zeros(len(PROMPTS), width, dtype=torch.int64, device="cuda:0")
    mask = torch.zeros(len(PROMPTS), width, dtype=torch.bool, device="cuda:0")
    for row, prompt in enumerate(PROMPTS):
        full[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = True
    size = [len(PROMPTS)]
    scorer = SGLangWrapper(
        engine,
        tokenizer=make_tiny_tokenizer(),
        generate=False,
        input_mode="tokens",
        pad_output=True,
    )
    out = scorer(
        TensorDict(
            tokens=Tokens(full=full, batch_size=size),
            masks=Masks(
                all_attention_mask=mask, all_assistant_mask=mask, batch_size=size
            ),
            batch_size=size,
            device="cuda:0",
        )
    )
    log_probs = out["log_probs"].full
    assert log_probs.device == torch.device("cuda:0")
    for row, prompt in enumerate(PROMPTS):
        found = log_probs[row, width - len(prompt) :].cpu()
        reference = expected(model, prompt[:1], prompt[1:])
        assert (found[1:] - reference).abs().max() < TOLERANCE
        assert not log_probs[row, : width - len(prompt)].any()
