"""What a run collects and evaluates, on a server that computes nothing."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import Counter

import pytest
import torch
from datasets import Dataset
from helpers.fake_launcher import FakeLauncher
from helpers.slow import diagonal
from torch.utils.data import DataLoader
from torchrl import logger as torchrl_logger

from torchrl_sglang import GRPO, AsyncLLMCollector
from torchrl_sglang.errors import CollectionError, ConfigurationError
from torchrl_sglang.policies.sampling import translate
from torchrl_sglang.trainers.collector_checks import check_groups

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = [{"query": f"q{number}"} for number in range(6)]


class Streamed:
    """As a streamed dataset: without a length, and read again from its beginning."""

    def __init__(self, rows=ROWS):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def sample(conversation, task):
    return float(conversation.sample)


@pytest.fixture
def make(fake_engine, tiny_model_path, tmp_path):
    """Makes a run on the server."""
    (tmp_path / "weights").mkdir()

    def made(**arguments):
        given = {
            "prompts": ROWS,
            "rewards": sample,
            "group_size": 2,
            "groups_per_batch": 2,
            "generate_kwargs": {"max_new_tokens": 4},
            "engine": fake_engine,
            "weight_sync": {"directory": tmp_path / "weights"},
            "output": tmp_path / "run",
            "logger": None,
            "recorder": False,
            "show_samples": None,
        }
        return GRPO(tiny_model_path, **{**given, **arguments})

    with torch.random.fork_rng(devices=[]):
        yield made


def rollouts_of(folder):
    lines = (folder / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_passes_over_a_stream_end_and_go_on(make, tmp_path):
    passes = {"prompts": Streamed(), "epochs": 2, "checkpoint_every": 1}
    interrupted = make(**passes)
    with interrupted:
        interrupted.begin()
        for batch in interrupted.batches():
            interrupted.step += 1
            interrupted.learner.train(batch, interrupted.collector.policy_version)
            interrupted.update_weights()
            interrupted.save()
            # In the second pass.
            if interrupted.step == 4:
                break
    run = make(**passes, resume=True)
    run.train()
    assert run.step == 6
    rows = rollouts_of(tmp_path / "run")
    assert Counter(row["prompt"] for row in rows) == {
        row["query"]: 2 * 2 for row in ROWS
    }


SEVEN = [{"query": f"q{number}"} for number in range(7)]


SIZES = {1: [4, 3], 2: [4, 4, 4, 2]}
"""Prompts of the batches, by the number of passes."""


@pytest.mark.parametrize(
    ("kind", "epochs"),
    diagonal([list, Streamed, Dataset.from_list, DataLoader], SIZES),
)
def test_passes_have_all_prompts(make, tmp_path, kind, epochs):
    make(prompts=kind(SEVEN), groups_per_batch=4, epochs=epochs).train()
    rows = rollouts_of(tmp_path / "run")
    sizes = [2 * size for size in SIZES[epochs]]
    assert [*Counter(row["step"] for row in rows).values()] == sizes
    assert Counter(row["prompt"] for row in rows) == {
        row["query"]: 2 * epochs for row in SEVEN
    }


@pytest.mark.parametrize("size", [None, 2, 4])
def test_a_pass_over_a_data_loader_has_all_its_tasks(make, size):
    assert make(prompts=DataLoader(ROWS, batch_size=size)).steps == 3
    assert make(prompts=DataLoader(ROWS, batch_size=size), epochs=2).steps == 6


def test_batches_of_held_out_prompts_are_taken_apart(make):
    run = make(eval_prompts=DataLoader(ROWS, batch_size=4), steps=1)
    assert [task["query"] for task in run._collecting.eval_prompts] == [
        row["query"] for row in ROWS
    ]


def collector_of(policy, **arguments):
    given = {"prompts": ROWS, "rewards": sample, "group_size": 2, "groups_per_batch": 2}
    return AsyncLLMCollector(policy=policy, max_staleness=0, **{**given, **arguments})


OWN = {"prompts": None, "rewards": None, "collector": collector_of}


def test_a_collector_of_ones_own_is_held_to_the_steps(make, tmp_path):
    run = make(**OWN, steps=2)
    run.train()
    assert run.step == 2
    assert {row["step"] for row in rollouts_of(tmp_path / "run")} == {1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 4}, "group_size=4, and the run compares group_size=2"),
        ({"batches_per_update": 2}, "sends weights after each batch"),
    ],
)
def test_a_collector_of_ones_own_that_does_not_fit(make, arguments, message):
    run = make(**{**OWN, "collector": lambda policy: collector_of(policy, **arguments)})
    with pytest.raises(ConfigurationError, match=message), run:
        pass


def test_groups_of_a_collector_that_does_not_tell_their_size(make):
    def untold(policy):
        made = collector_of(policy, groups_per_batch=4)
        del made.group_size
        return made

    run = make(**{**OWN, "collector": untold}, group_size=4)
    with pytest.raises(ConfigurationError, match="has the prompts 'q0' and 'q1'"):
        run.train()
    check_groups(["a", "a", "b", "b"], 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": ROWS}, "prompts cannot be given beside it"),
        ({"max_staleness": 1}, "max_staleness cannot be given beside it"),
        ({"on_stale": "mask"}, "on_stale cannot be given beside it"),
        ({"keep_group": any, "epochs": 2}, "keep_group and epochs cannot be given"),
        ({"eval_prompts": ROWS}, "eval_prompts are scored by the rewards of the run"),
    ],
)
def test_what_a_collector_of_ones_own_does_not_get(make, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**{**OWN, **arguments})


def test_a_run_updates_after_each_batch(make):
    with pytest.raises(ConfigurationError, match="larger with groups_per_batch"):
        make(collector={"batches_per_update": 2})


def test_held_out_prompts_that_cannot_be_scored_are_left_out(make, capsys):
    tasks = [{"query": f"held out {number}", "worth": number} for number in range(3)]
    scored = []

    def score(conversation, task):
        scored.append(task["query"])
        if task["worth"] == 1:
            raise ValueError("no verdict")
        return float(task["worth"])

    run = make(eval_prompts=tasks, rewards=score, collector={"max_retries": 0})
    with run:
        found = run.evaluate()
    assert sorted(scored) == ["held out 0", "held out 1", "held out 2"]
    assert (found["eval/prompts"], found["eval/reward"]) == (2.0, 1.0)
    assert "2 of 3 held-out prompts were scored" in capsys.readouterr().out


def test_no_held_out_prompt_can_be_scored(make):
    def fail(conversation, task):
        raise ValueError("no verdict")

    run = make(eval_prompts=ROWS[:2], rewards=fail, collector={"max_retries": 0})
    with run, pytest.raises(CollectionError, match=r"None of 2 held-out .*no verdict"):
        run.evaluate()


async def agent(task, *, base_url, api_key):
    return 1.0


NAMES = [
    {"stop_sequences": ["x"]},
    {"do_sample": True, "num_beams": 1},
    {"min_tokens": 2},
    {"include_stop_str_in_output": True, "stop": ["x"]},
]


@pytest.mark.parametrize("names", NAMES, ids=str)
@pytest.mark.parametrize("parts", [{}, {"rewards": None, "agent": agent}], ids=len)
def test_sampling_parameters_of_torchrl_and_vllm(make, names, parts):
    with make(generate_kwargs={"max_new_tokens": 4, **names}, **parts) as run:
        if run.gateway is not None:
            engine = translate(run.sampling).engine
            assert run.gateway.default_params == engine


@pytest.mark.parametrize("names", [{"logprobs": 2}, {"skip_special_tokens": True}])
def test_outputs_are_those_that_agents_ask_for(make, names):
    kwargs = {"max_new_tokens": 4, **names}
    with make(generate_kwargs=kwargs):
        pass
    with pytest.raises(ConfigurationError, match="an agent's requests say themselves"):
        make(generate_kwargs=kwargs, rewards=None, agent=agent)


def test_a_status_names_the_step_and_its_phase(make):
    """Of functions that a run calls while it collects, trains and evaluates."""
    seen = []

    def score(conversation, task):
        # Groups of a later step begin while the run evaluates.
        if "held_out" in task or not run.step:
            seen.append(run._status())
        return float(conversation.sample)

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(run._status())
            return super().step(closure)

    run = make(
        rewards=score,
        optimizer=lambda parameters: Watched(parameters, lr=0.1),
        eval_prompts=[{"query": "q", "held_out": True}],
        eval_every=1,
        steps=2,
    )
    run.train()
    words = [re.fullmatch(r"(step \d), \d+ s: (\w+)(,.*)?", each) for each in seen]
    phases = list(dict.fromkeys((each[1], each[2]) for each in words))
    assert phases == [
        ("step 0", "evaluating"),
        ("step 1", "collecting"),
        ("step 1", "training"),
        ("step 1", "evaluating"),
        ("step 2", "training"),
        ("step 2", "evaluating"),
        # PyTorch's checkpoint makes a step of nothing for the optimizer's state.
        ("step 2", "saving"),
    ]


def test_a_log_file_has_a_status_during_the_first_evaluation(make, capsys):
    said = threading.Event()

    def score(conversation, task):
        # Until the status was printed.
        assert said.wait(60)
        return 1.0

    run = make(rewards=score, eval_prompts=ROWS[:1], steps=1)
    run.status_seconds = 0.01
    report = run._status
    run._status = lambda: (said.set(), report())[1]
    run.train()
    assert re.search(
        r"^step 0, \d+ s: evaluating", capsys.readouterr().out, re.MULTILINE
    )


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING])
def test_the_log_of_a_run(make, tiny_model_path, level, monkeypatch):
    """Lines of starting servers, and those of each update only where all are wanted."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Lines()
    torchrl_logger.addHandler(handler)
    monkeypatch.setattr(torchrl_logger, "level", torchrl_logger.level)
    torchrl_logger.setLevel(level)
    launcher = FakeLauncher(tiny_model_path, 1)
    try:
        make(engine={"launcher": launcher}, steps=1).train()
    finally:
        torchrl_logger.removeHandler(handler)
        launcher.close()
    starts = any("is starting at" in line for line in lines)
    updates = any(line.startswith("Weights of version") for line in lines)
    assert (starts, updates) == (level <= logging.INFO, level == logging.DEBUG)
    assert torchrl_logger.level == level


def test_tensorboard_shows_each_step_of_a_resumed_run_once(make, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = {"logger": "tensorboard", "steps": 4, "resume": "auto"}
    for ends_after, saved in ((1, None), (3, 2), (None, None)):
        # The first one is killed before it has a checkpoint.
        with make(**given) as run:
            run.begin()
            for batch in run.batches():
                run.step += 1
                run.report(run.learner.train(batch, run.collector.policy_version))
                run.update_weights()
                if run.step == saved:
                    run.save()
                if run.step == ends_after:
                    break
    events = EventAccumulator(str(next((tmp_path / "run").rglob("events.*")).parent))
    events.Reload()
    steps = [each.step for each in events.Scalars("batch/reward")]
    assert steps == [1, 2, 3, 4]
