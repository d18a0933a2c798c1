"""The same promises on GPUs: engine on one device, NCCL from another.

Run with ``pytest -m gpu`` where a Python with CUDA has both sglang and this package.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme, SGLangWrapper
from torchrl_sglang.testing.gpu import server_arguments
from torchrl_sglang.testing.tiny_model import (
    make_tiny_model,
    make_tiny_tokenizer,
    save_tiny_model,
)

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(GPUS == 0, reason="there is no CUDA device"),
]

# SGLang's CUDA kernels take half precision only, whose rounding the tolerance allows
# for: two models of these shapes differ by about 1.
MODEL = {
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_range": 0.05,
    "dtype": torch.bfloat16,
}
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def gpu_model_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "model"
    return str(save_tiny_model(folder, **MODEL))


@pytest.fixture(scope="module")
def gpu_engine(gpu_model_path):
    """A server on the last GPU; the trainer uses the first."""
    with AsyncSGLang.from_pretrained(
        gpu_model_path,
        device="cuda",
        base_gpu_id=GPUS - 1,
        dtype=torch.bfloat16,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        start_timeout=300,
        **server_arguments(),
    ) as engine:
        yield engine


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
        ids = full.to(model.device)
        with torch.no_grad():
            reference = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        reference = reference.gather(-1, ids[1:, None])[:, 0].cpu()
        worst = max(worst, float((log_probs[1:] - reference).abs().max()))
    return worst


def new_model(seed: int, device: str) -> torch.nn.Module:
    model = make_tiny_model(make_tiny_tokenizer(), seed=seed, **MODEL)
    return model.to(device)


def test_log_probs(gpu_engine):
    assert difference(gpu_engine, new_model(0, "cuda:0")) < TOLERANCE


@torch.no_grad()
def scores(model, ids: list[int]) -> torch.Tensor:
    """Log-probability of each token but the first under a model."""
    full = torch.tensor(ids, device=model.device)
    log_probs = model(full[None]).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(-1, full[1:, None])[:, 0].cpu()


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
    model = new_model(0, "cuda:0")
    prompts = [[5, 6, 7, 8], [9] * 20, list(range(10, 60))]
    answers = gpu_engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": 32, "ignore_eos": True, **sampling},
        return_logprobs=True,
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 32
        assert answer.logprobs_mode == "model"
        reference = scores(model, prompt + answer.token_ids)[len(prompt) - 1 :]
        assert (torch.tensor(answer.log_probs) - reference).abs().max() < TOLERANCE


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
    model = new_model(0, "cuda:0")
    for found, ids in ((scored[0, 3:], [5, 6, 7]), (scored[1, 1:], [5, 6, 7, 8, 9])):
        assert (found - scores(model, ids)).abs().max() < TOLERANCE


@pytest.mark.skipif(GPUS < 2, reason="NCCL needs the trainer on a GPU of its own")
def test_nccl_broadcast(gpu_engine):
    scheme = SGLangWeightSyncScheme(gpu_engine, bucket_bytes=100_000)
    sender = scheme.create_sender()
    for seed in (3, 4):
        model = new_model(seed, "cuda:0")
        assert difference(gpu_engine, model) > 0.1
        report = sender.update_weights(model)
        assert report.num_buckets > 1
        assert difference(gpu_engine, model) < TOLERANCE
    scheme.shutdown()
