"""Policies that learn from a teacher, which a real server serves."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.modules.llm import Text, TransformersWrapper
from transformers import AutoModelForCausalLM

from torchrl_sglang import (
    GRPO,
    AsyncSGLang,
    CorrectedGRPOLoss,
    Distillation,
    SGLangWrapper,
    Teacher,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.testing.tiny_model import save_tiny_model
from torchrl_sglang.trainers.teacher import check_same_tokens

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = ("Hi", "How are you?", "A longer prompt, and more.")


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory):
    """Folder of another model with the same tokenizer."""
    return str(save_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=5))


@pytest.fixture(scope="module")
def teacher_model(teacher_path):
    return AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.float32)


@pytest.fixture(scope="module")
def teacher_engine(teacher_path):
    with AsyncSGLang.from_pretrained(teacher_path, device="cpu") as engine:
        yield engine


@pytest.fixture
def batch(engine):
    """Responses of the student, of different lengths."""
    policy = SGLangWrapper(
        engine,
        input_mode="text",
        generate_kwargs={"max_new_tokens": 9, "temperature": 1.0},
        return_log_probs=True,
    )
    rows = []
    for prompt in PROMPTS:
        text = Text(prompt=[prompt], batch_size=(1,))
        rows += policy(TensorDict(text=text, batch_size=(1,))).unbind(0)
    for row in rows:
        row["advantage"] = torch.zeros(1, 1)
    return LazyStackedTensorDict(*rows)


def log_probs_of(model, tokens):
    """Returns Hugging Face's log-probs of the next token at each position."""
    return model(tokens[None]).logits[0, :-1].double().log_softmax(-1)


def whole_divergences(student, teacher, batch):
    """Returns the reverse divergence of each response token, with a gradient."""
    values = []
    for row in batch.unbind(0):
        tokens, begin = row["tokens", "full"], len(row["tokens", "prompt"])
        p, q = (
            log_probs_of(model, tokens)[begin - 1 :] for model in (student, teacher)
        )
        values.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(values)


def make_loss(model, tokenizer, settings, **options):
    actor = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )
    return CorrectedGRPOLoss(
        actor, distillation=settings, entropy_bonus=False, **options
    )


def test_a_teachers_columns_equal_hugging_faces(batch, teacher_engine, teacher_model):
    scored = Teacher(teacher_engine, Distillation(k=8))(batch)
    for row in scored.unbind(0):
        tokens, begin = row["tokens", "full"], len(row["tokens", "prompt"])
        with torch.no_grad():
            expected = log_probs_of(teacher_model, tokens)[begin - 1 :]
        columns = row["teacher"]
        sampled = expected.gather(-1, tokens[begin:, None])[:, 0]
        assert (columns["log_probs"][begin:] - sampled).abs().max() < 1e-4
        top = expected.topk(8, -1)
        assert (columns["top_ids"][begin:] == top.indices).all()
        assert (columns["top_log_probs"][begin:] - top.values).abs().max() < 1e-4


@pytest.mark.parametrize("packing", [True, False])
def test_the_loss_has_the_gradient_of_the_whole_divergence(
    batch, hf_model, tokenizer, teacher_engine, teacher_model, packing
):
    settings = Distillation(k=teacher_engine.capabilities.vocab_size, weight=0.5)
    model = copy.deepcopy(hf_model)
    loss = make_loss(model, tokenizer, settings, packing=packing)
    output = loss(Teacher(teacher_engine, settings)(batch))
    output.loss_distillation.backward()
    twin = copy.deepcopy(hf_model)
    expected = whole_divergences(twin, teacher_model, batch).mean()
    (0.5 * expected).backward()
    assert abs(output.distillation.item() - expected.item()) < 1e-4
    assert output.distillation_missed.item() < 1e-4
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(found.grad, wanted.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("estimator", "steps", "share"),
    [("top_k", 30, 0.75), ("sampled", 3, 2.0), ("reward", 3, 2.0)],
)
def test_a_run_without_rewards_approaches_its_teacher(
    engine, tiny_model_path, teacher_engine, tmp_path, estimator, steps, share
):
    """Within a few steps only where the divergence is not estimated from a sample."""
    run = GRPO(
        tiny_model_path,
        prompts=[{"query": prompt} for prompt in PROMPTS] * steps,
        teacher=teacher_engine,
        distillation={"k": 16, "estimator": estimator},
        engine=engine,
        lr=1e-2,
        group_size=4,
        groups_per_batch=3,
        generate_kwargs={"max_new_tokens": 8},
        output=tmp_path / "run",
        logger=None,
        recorder=False,
        show_samples=None,
    )
    run.train()
    values = [step["train/distillation"] for step in run.history if step["step"]]
    assert len(values) == steps
    ends = min(5, steps // 3)
    assert 0 < sum(values[-ends:]) < share * sum(values[:ends])


def test_a_teacher_with_other_token_ids_is_refused(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<|more|>"])
    check_same_tokens(tokenizer, other, name="teacher")
    with pytest.raises(ConfigurationError, match=r"more\|>' is \d+ and missing"):
        check_same_tokens(other, tokenizer, name="teacher")


def one(conversation, task):
    return 1.0


def test_wrong_teachers_are_refused(engine, tiny_model_path, tmp_path):
    with pytest.raises(ConfigurationError, match="more than the 99 tokens"):
        Teacher(engine, Distillation(k=100))
    with pytest.raises(ConfigurationError, match="must be an engine"):
        Teacher("http://127.0.0.1:1", Distillation())
    common = {"prompts": ["Hi"], "output": tmp_path / "run"}
    for options, message in (
        ({"distillation": {"k": 8}, "rewards": one}, "give a teacher"),
        ({"teacher": {"num_replicas": 2}}, "either 'model'"),
        ({"teacher": 3}, "teacher must be"),
        ({"teacher": "a", "distillation": {"kk": 8}}, "Did you mean 'k'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            GRPO(tiny_model_path, **common, **options)


def test_a_batch_without_a_teachers_columns_is_refused(batch, hf_model, tokenizer):
    loss = make_loss(hf_model, tokenizer, Distillation())
    with pytest.raises(ConfigurationError, match="Learner\\(teacher="):
        loss(batch)
