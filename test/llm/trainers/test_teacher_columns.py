"""Rows that a teacher scores, its names and its settings; without servers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from helpers.learner_batches import make_batch
from helpers.scoring_engine import ScoringEngine
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang import GRPO, CorrectedGRPOLoss, Distillation, Learner, Teacher
from torchrl_sglang.errors import ConfigurationError, ServerDiedError
from torchrl_sglang.trainers.arguments import RunArguments
from torchrl_sglang.trainers.placement import COLOCATED_SHARE, place_apart
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.trainers.serving import Served
from torchrl_sglang.trainers.teaching import Teaching

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = Distillation(k=8)


@pytest.fixture
def scorer(hf_model, tokenizer):
    """An engine of the student's model."""
    return ScoringEngine(hf_model, tokenizer)


@pytest.fixture
def batch():
    return make_batch([0, 1, 0, 1], [3, 5, 1, 4])


@pytest.fixture
def make_learner(hf_model, tokenizer):
    def made(distillation, teacher):
        actor = TransformersWrapper(
            copy.deepcopy(hf_model),
            tokenizer=tokenizer,
            input_mode="tokens",
            generate=False,
        )
        loss = CorrectedGRPOLoss(
            actor, distillation=distillation, entropy_bonus=False, clip_epsilon=0.2
        )
        optimizer = torch.optim.SGD(actor.model.parameters(), lr=0.1)
        return Learner(loss, optimizer, teacher=teacher)

    return made


def with_column(batch, name, value):
    for row in batch.unbind(0):
        row.set(name, value)
    return batch


def padded(batch):
    """Returns rows as ``SGLangWrapper(pad_output=True)`` writes them."""

    def pad(*key):
        # Prompts of 3 tokens on the left, responses on the right.
        values = pad_sequence([row[key] for row in batch.unbind(0)], True)
        return torch.nn.functional.pad(values, (2, 0))

    masks = ("all_attention_mask", "all_assistant_mask")
    full = pad("tokens", "full")
    return TensorDict(
        tokens={"full": full, "prompt": full[:, :5]},
        masks={name: pad("masks", name) for name in masks},
    ).auto_batch_size_(1)


@pytest.mark.parametrize("prompt", [None, lambda task: "Say 7."])
def test_a_padded_batch_has_the_values_of_its_tokens(scorer, batch, prompt):
    """Padding is no token that a teacher reads."""
    teacher = Teacher(scorer, SETTINGS, prompt=prompt)
    found, expected = teacher(padded(batch)), teacher(batch)
    sent = sorted(request.input_ids for request in scorer.requests)
    assert sent[::2] == sent[1::2]
    for row, other in zip(found.unbind(0), expected.unbind(0), strict=True):
        written = row["masks", "all_assistant_mask"]
        assert len(row["teacher", "log_probs"]) == len(written)
        assert row["teacher", "log_probs"][~written].isnan().all()
        for name in ("log_probs", "top_ids", "top_log_probs"):
            assert (row["teacher", name][written] == other["teacher", name][3:]).all()


def test_a_task_may_name_its_teacher_in_a_column_named_teacher(
    make_learner, scorer, batch
):
    teacher = Teacher({"math": scorer}, SETTINGS, key="teacher")
    learner = make_learner(SETTINGS, teacher)
    metrics = learner.train(with_column(batch, "teacher", "math"))
    assert metrics["train/distillation"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("value", [["math"], {"a": 1}])
def test_names_that_are_no_keys_are_refused(scorer, batch, value):
    teacher = Teacher({"math": scorer}, SETTINGS, key="domain")
    with pytest.raises(ConfigurationError, match="there are teachers for 'math'"):
        teacher(with_column(batch, "domain", value))
    with pytest.raises(ConfigurationError, match="there are teachers for 'math'"):
        GRPO(
            "model",
            prompts=[{"query": "Hi", "domain": value}],
            teacher={"math": "model"},
            teacher_key="domain",
        )


@pytest.mark.parametrize("settings", [None, Distillation(k=4), Distillation()])
def test_a_teacher_of_another_loss_is_refused(make_learner, scorer, settings):
    """Its columns would be ignored, or be too few."""
    with pytest.raises(ConfigurationError, match="give both the same Distillation"):
        make_learner(settings, Teacher(scorer, SETTINGS))


def test_sampled_tokens_are_scored_by_any_teacher(make_learner, scorer, batch):
    settings = Distillation(estimator="sampled")
    metrics = make_learner(settings, Teacher(scorer, SETTINGS)).train(batch)
    assert metrics["train/distillation"] == pytest.approx(0, abs=1e-5)


def test_a_loss_takes_a_distillation_alone(make_learner):
    with pytest.raises(ConfigurationError, match="must be a Distillation, got {'k'"):
        make_learner({"k": 8}, None)
    with pytest.raises(ConfigurationError, match="no teacher would score batches"):
        GRPO("model", prompts=["Hi"], rewards=print, loss={"distillation": SETTINGS})


def test_a_teachers_folder_is_a_path(hf_model):
    arguments = {"prompts": ["Hi"], "rewards": print}
    for given, model in (
        (Path("/models/a"), "/models/a"),
        ("~/a", str(Path("~/a").expanduser())),
        ({"model": Path("~/a"), "tp_size": 2}, str(Path("~/a").expanduser())),
    ):
        teaching = Teaching(RunArguments("model", teacher=given, **arguments))
        assert teaching.teachers[None]["model"] == model
    with pytest.raises(ConfigurationError, match="is a module \\(Qwen2ForCausalLM\\)"):
        GRPO("model", teacher={"model": hf_model}, **arguments)


def test_a_teachers_prompt_has_the_students_template(scorer, batch, tokenizer):
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    teaching = Teaching(
        RunArguments(
            "model", prompts=["Hi"], teacher=scorer, teacher_prompt=lambda task: "Hi"
        )
    )
    served = Served(chat_template=template)
    teacher = teaching.make({None: scorer}, served, TrainerRanks())
    teacher(batch)
    prompt = tokenizer.encode("Hi!", add_special_tokens=False)
    response = batch[0]["tokens", "response"].tolist()
    assert [*prompt, *response] in [r.input_ids for r in scorer.requests]


def test_several_teachers_share_memory_and_no_gpu():
    def teaching(**second):
        arguments = RunArguments(
            "model",
            prompts=[{"query": "Hi", "name": "a"}],
            teacher={"a": "x", "b": {"model": "y", **second}},
            teacher_key="name",
            colocated=True,
        )
        return Teaching(arguments)

    placed = teaching(mem_fraction_static=0.2)._place()
    shares = [options["mem_fraction_static"] for options in placed.values()]
    assert shares == [COLOCATED_SHARE / 2, 0.2]
    # One with a GPU of its own does not sleep.
    apart = teaching(cuda_devices=[1])
    assert apart.sleeps == ["a"]
    placed = apart._place()
    assert placed["a"]["mem_fraction_static"] == COLOCATED_SHARE
    assert placed["b"] == {"model": "y", "cuda_devices": [1]}
    servers = {"a": {"num_replicas": 2}, "b": {"cuda_devices": [0]}, "c": {}}
    found = place_apart(servers, 4)
    assert [found[name]["cuda_devices"] for name in "abc"] == [[2, 3], [0], [1]]
    with pytest.raises(ConfigurationError, match="need 1 more GPUs than are visible"):
        place_apart(servers, 2)


@pytest.fixture
def failing(scorer, monkeypatch):
    """Answers the first calls of an engine with an error."""

    def fails(error, times):
        answer, errors = scorer.generate_requests, [error] * times

        def generate(requests, **options):
            return [errors.pop()] if errors else answer(requests, **options)

        monkeypatch.setattr(scorer, "generate_requests", generate)

    return fails


def test_an_outage_is_one_warning(scorer, batch, failing, log):
    failing(ServerDiedError("It has ended."), 2)
    Teacher(scorer, SETTINGS)(batch[:1])
    assert log.text.count("The teacher 'scoring' failed and is asked again") == 1


def test_a_refused_request_names_its_teacher(scorer, batch, failing):
    failing(ConfigurationError("The prompt has too many tokens."), 1)
    with pytest.raises(ConfigurationError, match="too many") as caught:
        Teacher(scorer, SETTINGS)(batch[:1])
    assert caught.value.__notes__ == ["It is a request to the teacher 'scoring'."]
