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


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.5}, {"logit_bias": {9: 4.0}}, {"frequency_penalty": 1.0}],
    ids=lambda sampling: next(iter(sampling)),
)
def test_log_probs_are_the_models_own(gpu_engine, sampling):
    model, prompt = new_model(0, "cuda:0"), [5, 6, 7]
    (answer,) = gpu_engine.generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": 16, "ignore_eos": True, **sampling},
        return_logprobs=True,
    )
    ids = torch.tensor([*prompt, *answer.token_ids], device=model.device)
    with torch.no_grad():
        reference = model(ids[None]).logits[0, 2:-1].float().log_softmax(-1)
    reference = reference.gather(-1, ids[3:, None])[:, 0].cpu()
    found = torch.tensor(answer.log_probs)
    assert float((found - reference).abs().max()) < TOLERANCE


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
    scored = scorer(td)["log_probs", "full"]
    assert scored.shape == tokens.shape
    assert scored[0, :3].eq(0).all()
    assert scored[0, 3:].lt(0).all()


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
