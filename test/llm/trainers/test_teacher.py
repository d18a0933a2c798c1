"""Policies that learn from a teacher, which a real server serves."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from pathlib import Path

import openai
import pytest
import torch
from helpers.csv_logs import logged
from helpers.memory_saver import write_saver_python
from helpers.small_runs import few_tokens
from helpers.tool_template import TOOL_TEMPLATE
from helpers.torchrun import run_ranks
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.modules.llm import Text, TransformersWrapper
from transformers import AutoModelForCausalLM

from torchrl_sglang import (
    GRPO,
    AsyncSGLang,
    CorrectedGRPOLoss,
    Distillation,
    Learner,
    SGLangWrapper,
    Teacher,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    NotFiniteError,
    UnsupportedByServerError,
)
from torchrl_sglang.testing.tiny_model import save_tiny_model
from torchrl_sglang.trainers.teacher import check_same_tokens

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

PROGRAM = Path(__file__).with_name("train_program.py")
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


@pytest.fixture
def make(restored_engine, tiny_model_path, tmp_path):
    """Makes a run whose engine is the session's."""

    def made(**arguments):
        defaults = {
            "prompts": [{"query": prompt} for prompt in PROMPTS],
            "engine": restored_engine,
            "lr": 1e-2,
            "group_size": 4,
            "groups_per_batch": 3,
            "generate_kwargs": {"max_new_tokens": 8},
            "output": tmp_path / "run",
            "logger": None,
            "recorder": False,
            "show_samples": None,
        }
        return GRPO(**{"model": tiny_model_path, **defaults, **arguments})

    return made


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
        assert columns["log_probs"][:begin].isnan().all()
        top = expected.topk(8, -1)
        assert (columns["top_ids"][begin:] == top.indices).all()
        assert (columns["top_log_probs"][begin:] - top.values).abs().max() < 1e-4


def test_rows_that_fill_the_context_lose_their_last_tokens(
    batch, teacher_engine, hf_model, tokenizer, monkeypatch, caplog
):
    settings = Distillation(k=8)
    whole = Teacher(teacher_engine, settings)(batch)
    lengths = [len(row["tokens", "full"]) for row in batch.unbind(0)]
    longest = max(lengths)
    kind = type(teacher_engine.capabilities)
    monkeypatch.setattr(kind, "longest_prompt", property(lambda self: longest - 3))
    cut = Teacher(teacher_engine, settings)(batch)
    assert caplog.text.count("leave the loss") == 1
    for before, row, length in zip(
        whole.unbind(0), cut.unbind(0), lengths, strict=True
    ):
        end = min(length, longest - 3)
        for name in ("log_probs", "top_ids", "top_log_probs"):
            expected, found = before["teacher", name], row["teacher", name]
            assert torch.allclose(expected[:end], found[:end], 1e-5, equal_nan=True)
        assert not row["masks", "all_assistant_mask"][end:].any()
        assert row["log_probs", "full"][end:].isnan().all()
    # The batch itself keeps its tokens, and the rest has a finite loss.
    assert batch[lengths.index(longest)]["masks", "all_assistant_mask"][-1]
    assert make_loss(hf_model, tokenizer, settings)(cut).loss_distillation.isfinite()
    # A teacher whose context is shorter by more is not the right one.
    monkeypatch.setattr(kind, "longest_prompt", property(lambda self: longest - 9))
    with pytest.raises(ConfigurationError, match="context_length"):
        Teacher(teacher_engine, settings)(batch)


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


def test_a_run_approaches_its_teacher(make, teacher_engine):
    """Also beside rewards that say nothing of it."""
    run = make(
        steps=16,
        lr=2e-2,
        teacher=teacher_engine,
        distillation={"k": 16, "weight": 10.0},
        rewards=lambda conversation, task: len(conversation.turns[-1].token_ids),
    )
    run.train()
    values = [step["train/distillation"] for step in run.history if step["step"]]
    assert 0 < sum(values[-3:]) < 0.85 * sum(values[:3]), values
    assert run.metrics["time/score"] > 0


@torch.no_grad()
def sample(model, count, length=6):
    """Returns responses of a model, as a collector writes them."""
    tokens = torch.tensor([[5, 6, 7]] * count)
    log_probs = torch.full(tokens.shape, torch.nan)
    for _ in range(length):
        logits = model(tokens).logits[:, -1].log_softmax(-1)
        chosen = logits.exp().multinomial(1)
        tokens = torch.cat([tokens, chosen], -1)
        log_probs = torch.cat([log_probs, logits.gather(-1, chosen)], -1)
    written = torch.arange(tokens.shape[1]) >= 3
    masks = {"all_attention_mask": torch.ones_like(written)}
    masks["all_assistant_mask"] = written
    return LazyStackedTensorDict(
        *(
            TensorDict(
                tokens={"full": row, "prompt": row[:3], "response": row[3:]},
                masks=masks,
                log_probs={"full": values},
                advantage=torch.zeros(1, 1),
            )
            for row, values in zip(tokens, log_probs, strict=True)
        )
    )


@pytest.mark.parametrize(
    "estimator", ["sampled", pytest.param("reward", marks=pytest.mark.slow)]
)
def test_estimates_from_samples_approach_their_teacher(
    hf_model, tokenizer, teacher_engine, teacher_model, estimator
):
    """By the whole divergence of the same tokens before and after."""
    torch.manual_seed(0)
    settings = Distillation(estimator=estimator)
    loss = make_loss(hf_model, tokenizer, settings)
    learner = Learner(
        loss,
        torch.optim.Adam(hf_model.parameters(), lr=1e-2),
        teacher=Teacher(teacher_engine, settings),
    )
    held_out = sample(hf_model, 32)
    before = whole_divergences(hf_model, teacher_model, held_out).mean().item()
    for _ in range(6):
        metrics = learner.train(sample(hf_model, 32), 0)
        assert metrics["train/distillation_variance"] > 0
    after = whole_divergences(hf_model, teacher_model, held_out).mean().item()
    assert after < 0.9 * before


def search(query: str) -> str:
    """Looks something up.

    Args:
        query: what.
    """
    return "7"


def go_on(conversation, task):
    """Says something after the first response."""
    return "Go on." if len(conversation.turns) == 1 else None


async def greet(task, *, base_url, api_key):
    """An agent of two turns."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": task["query"]}]
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=6
            )
            said = answer.choices[0].message.content
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "Go on."},
            ]
    return 1.0


@torch.no_grad()
def mean_divergence(student, teacher, batch):
    """Returns the mean reverse divergence of the tokens that the policy wrote."""
    values = []
    for row in batch.unbind(0):
        tokens, written = row["tokens", "full"], row["masks", "all_assistant_mask"]
        p, q = (log_probs_of(model, tokens) for model in (student, teacher))
        values.append((p.exp() * (p - q)).sum(-1)[written[1:]])
    return torch.cat(values).mean().item()


def check_steps(run, teacher_model, steps=2):
    """Compares the divergence of each step with Hugging Face's."""
    with run:
        run.begin()
        for batch in run.batches():
            run.step += 1
            expected = mean_divergence(run.model, teacher_model, batch)
            with run.memory_for_training():
                metrics = run.learner.train(batch, run.collector.policy_version)
            assert metrics["train/distillation"] == pytest.approx(expected, rel=1e-3)
            assert metrics["train/distillation_missed"] < 1e-4
            run.update_weights()
        assert run.step == steps


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"max_staleness": 1, "correction": "decoupled_token_is"}, id="asynchronous"
        ),
        pytest.param({"agent": greet}, id="agent", marks=pytest.mark.slow),
        pytest.param(
            {
                "tools": [search],
                "chat_template": TOOL_TEMPLATE,
                "max_turns": 3,
                "step": go_on,
            },
            id="tools",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_kind_of_run_has_the_divergence_of_its_tokens(
    make, teacher_engine, teacher_model, options
):
    run = make(
        steps=2,
        teacher=teacher_engine,
        distillation={"estimator": "vocabulary"},
        **options,
    )
    check_steps(run, teacher_model)


@pytest.mark.parametrize("k", [4, "mass:0.9"])
def test_a_teacher_scores_groups_while_others_are_generated(make, teacher_engine, k):
    """But for a number of top tokens that a whole batch decides."""
    run = make(steps=1, teacher=teacher_engine, distillation={"k": k})
    with run:
        run.begin()
        collected = next(iter(run.collector))
        assert (("teacher", "log_probs") in collected.keys(True)) is (k == 4)
        batch = run.learner.score(collected)
        again = Teacher(teacher_engine, Distillation(k=k))(batch)
        for row, other in zip(batch.unbind(0), again.unbind(0), strict=True):
            scores, wanted = row["teacher", "log_probs"], other["teacher", "log_probs"]
            assert torch.allclose(scores, wanted, atol=1e-5, equal_nan=True)


def test_an_adapter_learns_from_a_teacher(
    make, lora_engine, teacher_engine, teacher_model
):
    run = make(
        steps=2,
        engine=lora_engine,
        lora={"r": 4},
        teacher=teacher_engine,
        distillation={"estimator": "vocabulary"},
    )
    check_steps(run, teacher_model)


@pytest.mark.slow
def test_a_teacher_sleeps_while_the_student_generates_and_trains(
    make, teacher_path, teacher_model, tmp_path
):
    """The memory saver is a stand-in."""
    python = write_saver_python(tmp_path)
    run = make(
        steps=2,
        engine={"python": python},
        colocated=True,
        teacher={"model": teacher_path, "python": python},
        distillation={"estimator": "vocabulary"},
    )
    check_steps(run, teacher_model)
    assert run.clock.totals["score"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_score_with_a_teacher_that_sleeps(
    teacher_path, tiny_model_path, tmp_path
):
    """Only the first rank wakes it up."""
    python = str(write_saver_python(tmp_path))
    options = {
        "colocated": True,
        "engine": {"python": python},
        "teacher": {"model": teacher_path, "python": python},
        "distillation": {"k": 16},
    }
    arguments = (tiny_model_path, "", tmp_path / "run", 2)
    run_ranks(PROGRAM, *arguments, json.dumps(options), timeout=380)
    values = logged(tmp_path / "run", "train/distillation")
    assert len(values) == 2
    assert min(values) > 0


@pytest.mark.slow
def test_ranks_score_their_shares(
    restored_engine, teacher_engine, tiny_model_path, tmp_path
):
    options = {"teacher": teacher_engine.server_url, "distillation": {"k": 16}}
    arguments = (tiny_model_path, restored_engine.server_url, tmp_path / "run", 2)
    run_ranks(PROGRAM, *arguments, json.dumps(options))
    values = logged(tmp_path / "run", "train/distillation")
    assert len(values) == 2
    assert min(values) > 0


@pytest.mark.parametrize(
    "teacher", ["student", pytest.param("initial", marks=pytest.mark.slow)]
)
def test_a_model_teaches_itself(make, hf_model, engine, teacher):
    """With a prompt that says more; an old version remains what it was."""
    run = make(
        steps=2,
        teacher=teacher,
        teacher_prompt=lambda task: f"{task['query']} Say 7.",
        distillation={"estimator": "vocabulary"},
    )
    with run:
        run.begin()
        for batch in run.batches():
            run.step += 1
            model = run.model if teacher == "student" else hf_model
            for row in batch.unbind(0):
                begin = len(row["tokens", "prompt"])
                said = [{"role": "user", "content": f"{row['query']} Say 7."}]
                text = run.policy.template.render(said)
                whole = [
                    *run.policy.template.encode(text),
                    *row["tokens", "full"][begin:].tolist(),
                ]
                length = len(whole) - len(row["tokens", "full"]) + begin
                expected = expected_columns(model, whole, length)
                found = row["teacher", "log_probs"][begin:]
                assert (found - expected).abs().max() < 1e-3
            run.learner.train(batch, run.collector.policy_version)
            run.update_weights()
        assert run.step == 2


def expected_columns(model, whole, begin):
    """Returns Hugging Face's log-probs of a response."""
    with torch.no_grad():
        values = log_probs_of(model, torch.tensor(whole))[begin - 1 :]
    return values.gather(-1, torch.tensor(whole)[begin:, None])[:, 0]


def test_tasks_choose_teachers_and_prompts(
    batch, engine, hf_model, teacher_engine, teacher_model, tokenizer
):
    """Response tokens stay where they are, whatever is before them."""
    names = ["old", "new", "old"]
    for row, name in zip(batch.unbind(0), names, strict=True):
        row.set("name", name)
        row["hint"] = torch.tensor(7)

    def prompt(task):
        return f"The answer is {task['hint'] + 1}. {task['name']}?"

    teacher = Teacher(
        {"old": engine, "new": teacher_engine},
        Distillation(k="mass:0.9"),
        key="name",
        prompt=prompt,
    )
    scored = teacher(batch)
    ks = {row["teacher", "top_ids"].shape[-1] for row in scored.unbind(0)}
    assert len(ks) == 1
    assert 1 < (k := ks.pop()) < 99
    # A batch without tokens of the policy says nothing of the next one.
    unwritten = batch.clone()
    for row in unwritten.unbind(0):
        row["masks", "all_assistant_mask"] = torch.zeros_like(
            row["masks", "all_assistant_mask"]
        )
    teacher(unwritten)
    # Few tokens were enough for the last batch.
    teacher._asked = 2
    again = teacher(batch)
    assert {row["teacher", "top_ids"].shape[-1] for row in again.unbind(0)} == {k}
    models = {"old": hf_model, "new": teacher_model}
    for row, name in zip(scored.unbind(0), names, strict=True):
        said = [{"role": "user", "content": f"The answer is 8. {name}?"}]
        text = tokenizer.apply_chat_template(
            said, tokenize=False, add_generation_prompt=True
        )
        shown = tokenizer.encode(text, add_special_tokens=False)
        begin = len(row["tokens", "prompt"])
        response = row["tokens", "full"][begin:].tolist()
        expected = expected_columns(models[name], shown + response, len(shown))
        found = row["teacher", "log_probs"]
        assert len(found) == len(row["tokens", "full"])
        assert found[:begin].isnan().all()
        assert (found[begin:] - expected).abs().max() < 1e-4
    batch[0].set("name", "other")
    with pytest.raises(ConfigurationError, match="name='other', and there are teach"):
        teacher(batch)
    for row in batch.unbind(0):
        row.set("name", "old")
        row["step_count"] = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ConfigurationError, match="a row of a later turn"):
        teacher(batch)


def test_turns_of_a_conversation_are_one_request(engine, fake_engine, fake):
    """So are equal responses."""
    long, short = [5, 6, 7, 8, 9, 10], [5, 6, 7, 8]
    rows = []
    for tokens, begin in ((short, 2), (long, 5), (short, 2), ([5, 6, 9], 2)):
        full = torch.tensor(tokens)
        mask = torch.arange(len(full)) >= begin
        masks = TensorDict(all_assistant_mask=mask)
        content = TensorDict(full=full, prompt=full[:begin])
        rows.append(TensorDict(tokens=content, masks=masks))
    batch = LazyStackedTensorDict(*rows)
    Teacher(fake_engine, Distillation(estimator="sampled"))(batch)
    sent = sorted(
        pair
        for content in fake.payloads()
        for pair in zip(content["input_ids"], content["logprob_start_len"], strict=True)
    )
    assert sent == [([5, 6, 7, 8, 9, 10], 1), ([5, 6, 9], 1)]
    scored = Teacher(engine, Distillation(k=2))(batch)
    alone = [Teacher(engine, Distillation(k=2))(row.unsqueeze(0))[0] for row in rows]
    for row, other in zip(scored.unbind(0), alone, strict=True):
        assert (row["teacher", "top_ids"] == other["teacher", "top_ids"]).all()
        for name in ("log_probs", "top_log_probs"):
            values, wanted = row["teacher", name], other["teacher", name]
            assert torch.allclose(values, wanted, atol=1e-5, equal_nan=True)


def test_a_teacher_that_is_not_a_number_costs_no_step(
    fake, fake_engine, hf_model, tokenizer, batch
):
    """Its NaN is neither a probability nor a gradient."""
    settings = Distillation(estimator="sampled")
    loss = make_loss(hf_model, tokenizer, settings)
    optimizer = torch.optim.SGD(hf_model.parameters(), lr=1.0)
    before = copy.deepcopy(hf_model.state_dict())
    teacher = Teacher(fake_engine, settings)
    learner = Learner(loss, optimizer, teacher=teacher)
    with fake.misbehaving("null_log_probs"):
        with pytest.raises(NotFiniteError, match="'teacher', 'log_probs'"):
            loss(teacher(batch))
        with pytest.warns(RuntimeWarning, match="No optimizer step"):
            metrics = learner.train(batch, 0)
    assert metrics["train/skipped"] == 1
    after = hf_model.state_dict()
    assert all((after[name] == value).all() for name, value in before.items())


@pytest.mark.slow
def test_a_teacher_that_dies_is_waited_for(teacher_path, batch):
    with AsyncSGLang.from_pretrained(teacher_path, device="cpu") as engine:
        teacher = Teacher(engine, Distillation(k=4))
        before = teacher(batch)
        os.kill(engine.servers[0].pid, signal.SIGKILL)
        after = teacher(batch)
    for row, other in zip(before.unbind(0), after.unbind(0), strict=True):
        assert (row["teacher", "top_ids"] == other["teacher", "top_ids"]).all()


def test_a_teacher_with_other_token_ids_is_refused(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<|more|>"])
    check_same_tokens(tokenizer, other, name="teacher")
    with pytest.raises(ConfigurationError, match=r"more\|>' is \d+ and missing"):
        check_same_tokens(other, tokenizer, name="teacher")


def test_other_token_ids_are_refused_before_servers_start(
    make, teacher_path, tokenizer, tmp_path
):
    """A start would fail: there is no such interpreter."""
    other = tmp_path / "other"
    shutil.copytree(teacher_path, other)
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens(["<|more|>"])
    model = tmp_path / "student"
    shutil.copytree(teacher_path, model)
    changed.save_pretrained(model)
    run = make(
        model=str(model), engine=None, teacher={"model": str(other), "python": "/no"}
    )
    with pytest.raises(ConfigurationError, match=r"more\|>' is \d+ and missing"):
        run.train()
    run = make(teacher={"model": str(other), "python": "/no"}, distillation={"k": 300})
    with pytest.raises(ConfigurationError, match="k=300 is more than the"):
        run.train()


def test_wrong_teachers_are_refused(engine, fake_engine, tiny_model_path, tmp_path):
    with pytest.raises(ConfigurationError, match="more than the 99 tokens"):
        Teacher(engine, Distillation(k=100))
    with pytest.raises(UnsupportedByServerError, match="give estimator='sampled'"):
        Teacher(fake_engine, Distillation())
    with pytest.raises(ConfigurationError, match="must be an engine"):
        Teacher("http://127.0.0.1:1", Distillation())
    common = {"prompts": ["Hi"], "output": tmp_path / "run"}
    for options, message in (
        ({"distillation": {"k": 8}, "rewards": few_tokens}, "give a teacher"),
        ({"teacher_key": "name", "rewards": few_tokens}, "give a teacher"),
        ({"teacher": {"a": "b"}, "teacher_key": "name"}, "name=None, and there are"),
        ({"teacher": "a", "teacher_key": "name"}, "a mapping of its values"),
        ({"teacher": "student"}, "give it a teacher_prompt"),
        ({"teacher": "student", "teacher_prompt": lambda: 1}, "called with \\(task"),
        ({"teacher": "a", "teacher_prompt": str, "step": print}, "max_turns=1"),
        ({"teacher": {"num_replicas": 2}}, "either 'model'"),
        ({"teacher": 3}, "teacher must be"),
        ({"teacher": {"model_path": "a"}}, "give its model as 'model'"),
        ({"teacher": {"model": "a", "urls": ["http://b"]}}, "either 'model'"),
        ({"teacher": "a", "distillation": {"kk": 8}}, "Did you mean 'k'"),
        (
            {
                "teacher": {"x": "a", "y": "student"},
                "teacher_key": "name",
                "teacher_prompt": lambda task: "Hi",
                "prompts": [{"query": "Hi", "name": "x"}],
                "colocated": True,
            },
            "cannot be another teacher",
        ),
        (
            {
                "teacher": "a",
                "distillation": {"estimator": "reward"},
                "correction": "decoupled_token_is",
                "minibatches": 2,
            },
            "by a recomputed policy",
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            GRPO(tiny_model_path, **{**common, **options})
    run = GRPO(tiny_model_path, **common, teacher="/no/such/folder")
    with pytest.raises(ConfigurationError, match="no model folder"):
        run.train()


def test_a_batch_without_a_teachers_columns_is_refused(batch, hf_model, tokenizer):
    loss = make_loss(hf_model, tokenizer, Distillation())
    with pytest.raises(ConfigurationError, match="Learner\\(teacher="):
        loss(batch)
