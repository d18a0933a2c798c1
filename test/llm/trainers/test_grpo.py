"""GRPO in one call, on a real engine: what is trained, written, and goes on."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import torch
from helpers.fake_launcher import FakeLauncher
from helpers.forked_starts import forked_process, trainer_python
from helpers.log_probs import TOLERANCE, difference
from helpers.small_runs import few_tokens
from helpers.tool_template import TOOL_TEMPLATE
from helpers.torchrun import run_ranks
from helpers.waiting import wait_for_text
from torch.distributed.checkpoint import FileSystemReader
from torchrl._utils import logger as torchrl_logger
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_sglang import GRPO, CorrectedGRPOLoss, has_variance
from torchrl_sglang.errors import (
    CheckpointError,
    CollectionError,
    ConfigurationError,
    WeightSyncStateError,
)
from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.trainers import run as run_module
from torchrl_sglang.trainers.methods import METHODS, overlong_penalty
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.trainers.released_memory import ReleasedMemory
from torchrl_sglang.trainers.report import PhaseClock
from torchrl_sglang.trainers.run import Run
from torchrl_sglang.trainers.training import Training
from torchrl_sglang.types import ServerArgs
from torchrl_sglang.viewer.groups import conversations_of
from torchrl_sglang.viewer.page import read_runs

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

PROGRAM = Path(__file__).with_name("train_program.py")
LIMIT_SECONDS = 150.0
PROMPTS = [{"query": f"Say {number}.", "number": number} for number in range(24)]
HELD_OUT = [{"query": f"Say {number}."} for number in range(30, 36)]


class TakenColumn:
    """Tasks whose first one is not seen before the run."""

    def __iter__(self):
        return iter([{"query": "a", "advantage": 1.0}] * 4)


class Columns:
    """Rows by their places, with a length, as those of the datasets library."""

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return {"text": "a"}


class Broken(Columns):
    def __getitem__(self, place):
        raise OSError("disk")


Table = type("DataFrame", (list,), {"__module__": "pandas.core.frame"})


def vowels(conversation, task):
    return float(sum(letter in "aeiou" for letter in conversation.response))


@pytest.fixture
def make_on(tiny_model_path, tmp_path):
    """Makes a run on servers."""

    def made(engine, **arguments):
        given = {
            "model": tiny_model_path,
            "prompts": PROMPTS,
            "rewards": few_tokens,
            "generate_kwargs": {"max_new_tokens": 12},
            "group_size": 4,
            "groups_per_batch": 4,
            "steps": 3,
            "lr": 2e-3,
            "engine": engine,
            "output": tmp_path / "run",
        }
        return GRPO(**{**given, **arguments})

    with torch.random.fork_rng(devices=[]):
        yield made


@pytest.fixture
def make(restored_engine, make_on):
    """Makes a run on the servers of the test session."""
    return lambda **arguments: make_on(**{"engine": restored_engine, **arguments})


def rollouts_of(folder):
    lines = (folder / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def scalar(folder, name):
    (path,) = (folder / "logs").rglob(f"scalars/{name}.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    return {int(step): float(value) for step, value in rows}


@pytest.mark.slow
def test_two_runs_on_the_same_servers(make, restored_engine, tmp_path):
    """Each of them ends, as soon as it would train on the other's tokens."""
    servers = {"engine": restored_engine.server_url}
    run, other = make(**servers), make(**servers, output=tmp_path / "other")
    with run, other:
        for each in (other, run):
            each.begin()
        words = rf"Batch 1 has tokens of .* '\d+' .*{servers['engine']}.*warn"
        with pytest.raises(CollectionError, match=words) as error:
            next(iter(other.batches()))
        assert isinstance(error.value.__cause__, WeightSyncStateError)
        batches = iter(run.batches())
        run.learner.train(next(batches), run.collector.policy_version)
        with run.collector.pause():
            run.update_weights()
            sent = other.scheme.create_sender().update_weights().version
        with pytest.raises(CollectionError, match=f"Batch 2 .* version '{sent}'"):
            next(batches)


def test_a_run_that_another_one_may_disturb(make, restored_engine, tmp_path):
    servers = {"engine": restored_engine.server_url}
    allowed = {"collector": {"on_other_sender": "warn"}}
    with make(**servers, **allowed) as run, make(**servers, output=tmp_path / "b") as b:
        run.begin()
        b.begin()
        assert next(iter(run.batches())) is not None


def test_a_synchronous_run(make, restored_engine, tmp_path, capsys):
    level = torchrl_logger.level
    run = make(
        steps=12,
        rewards={"short": (few_tokens, 2.0), "vowels": (vowels, 0.25)},
        eval_prompts=HELD_OUT,
        eval_every=6,
        checkpoint_every=5,
    )
    folder = run.train()
    assert folder == tmp_path / "run" / "model"
    # What is saved is what the servers generate with.
    trained = AutoModelForCausalLM.from_pretrained(folder)
    assert difference(restored_engine, trained) < TOLERANCE
    assert AutoTokenizer.from_pretrained(folder).chat_template
    (seen,) = read_runs([Recording.open(folder.parent)])
    held_out = [group.batch for group in seen.groups if group.status == "held-out"]
    assert Counter(held_out) == dict.fromkeys((0, 6, 12), len(HELD_OUT))
    assert seen.settings["group_size"] == str(run.group_size)
    assert seen.settings["version.sglang"]
    # It learned.
    rewards = list(scalar(folder.parent, "batch/reward").values())
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    assert set(scalar(folder.parent, "eval/reward")) == {0, 6, 12}
    assert (folder.parent / "best" / "config.json").exists()
    for name in ("eval/reward", "batch/reward"):
        kept = {each["step"]: each[name] for each in run.history if name in each}
        assert kept == pytest.approx(scalar(folder.parent, name), abs=1e-6)
    # Trainer and engine are the same policy at the start of each batch.
    assert max(scalar(folder.parent, "train/kl_approx").values()) < 5e-6
    assert set(scalar(folder.parent, "batch/age").values()) == {0.0}
    rows = rollouts_of(folder.parent)
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, 13), 16)
    assert all(row["prompt"].startswith("Say ") for row in rows)
    weighted = [2.0 * -row["tokens"] / 10 for row in rows]
    assert all(r["reward"] >= w - 1e-5 for r, w in zip(rows, weighted, strict=True))
    checkpoints = sorted((folder.parent / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step_00000010", "step_00000012"]
    printed = capsys.readouterr().out
    assert re.search(r"step 12/12: reward -?\d.*eval .*tokens/s", printed)
    assert re.search(r"The model is in .*\. \w+.* bounds the run \(collect", printed)
    assert "'Say " in printed
    assert torchrl_logger.level == level


def test_an_asynchronous_run_with_a_correction(make, tmp_path):
    run = make(steps=6, max_staleness=2, correction="decoupled_token_is")
    run.train()
    ages = scalar(tmp_path / "run", "batch/age_max")
    assert max(ages.values()) <= 2
    weights = scalar(tmp_path / "run", "rollout_corr/rollout_is_mean")
    assert weights[1] == pytest.approx(1.0, abs=1e-3)
    assert len(weights) == 6


@pytest.mark.parametrize("method", METHODS)
def test_methods(make, method):
    run = make(method=method, steps=2, kl_to_ref_coeff=0.01, minibatches=2)
    run.train()
    assert type(run.learner.loss) is METHODS[method].loss
    assert run.metrics["train/kl_to_ref"] >= 0
    assert run.learner.steps == 4


def test_lora(make, lora_engine, peft_models, tmp_path):
    """The adapter alone is trained, sent and saved."""
    run = make(
        engine=lora_engine.server_url,
        lora={"r": 4, "lora_alpha": 8},
        kl_to_ref_coeff=0.1,
        correction="bypass_ppo_clip",
        checkpoint_every=1,
    )
    with run:
        run.begin()
        for batch in run.batches():
            run.step += 1
            run.learner.train(batch, run.collector.policy_version)
            run.update_weights()
            run.report({})
        run.finish()
        (answer,) = run.engine.generate(
            input_ids=[[5, 6, 7, 8]],
            sampling_params={"max_new_tokens": 6, "ignore_eos": True},
            return_logprobs=True,
        )
        assert peft_models.difference(answer, [5, 6, 7, 8], run.model) < TOLERANCE
        for name in run.engine.adapters:
            run.engine.unload_adapter(name)
    assert (tmp_path / "run" / "model" / "adapter_config.json").exists()
    (*_, path) = sorted((tmp_path / "run" / "checkpoints").iterdir())
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    names = [name for name in saved if name.startswith("learned.model.")]
    assert names
    assert all("lora_" in name for name in names)


def test_a_run_that_goes_on(make, tmp_path):
    """With the state of its last checkpoint, and every prompt once in an epoch."""
    first = make(steps=None, epochs=2, max_staleness=1)
    assert first.steps == 12
    with first:
        first.begin()
        for batch in first.batches():
            first.step += 1
            first.learner.train(batch, first.collector.policy_version)
            first.update_weights()
            if first.step == 4:
                first.save()
                saved = {k: v.clone() for k, v in first.model.state_dict().items()}
            if first.step == 6:
                break
    assert Counter(row["step"] for row in rollouts_of(tmp_path / "run")).keys() == set(
        range(1, 7)
    )
    with pytest.raises(ConfigurationError, match="give resume='auto'"):
        make(epochs=2, steps=None).train()
    for other in ({"group_size": 8}, {"seed": 1}, {"method": "dapo"}):
        with pytest.raises(ConfigurationError, match="was saved with"):
            make(resume=True, **other).train()
    second = make(steps=None, epochs=2, max_staleness=1, resume=True)
    with second:
        second.begin()
        for name, value in second.model.state_dict().items():
            assert torch.equal(value, saved[name]), name
        assert second.step == 4
        for batch in second.batches():
            second.step += 1
            second.learner.train(batch, second.collector.policy_version)
            second.update_weights()
        second.finish()
    rows = rollouts_of(tmp_path / "run")
    assert Counter(row["prompt"] for row in rows) == {
        each["query"]: 2 * 4 for each in PROMPTS
    }
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, 13), 16)


def test_runs_that_cannot_go_on_reach_no_server(make, restored_engine, tmp_path):
    """Other prompts, a state that is none, and weights that a disk has lost."""
    make(steps=1).train()
    served = restored_engine.control.weight_versions
    before = run_sync(served(timeout=5))
    newest = tmp_path / "run" / "checkpoints" / "step_00000001"
    again = {"steps": 2, "resume": True}
    with pytest.raises(ConfigurationError, match="state is of prompts with length"):
        make(**again, prompts=PROMPTS[:2]).train()
    kept = (newest / "run.pt").read_bytes()
    state = torch.load(newest / "run.pt", weights_only=False)
    torch.save({**state, "collector": {"pool": 3}}, newest / "run.pt")
    with pytest.raises(ConfigurationError, match="not belong to an AsyncLLM"):
        make(**again).train()
    (newest / "run.pt").write_bytes(kept)
    (path,) = newest.glob("*.distcp")
    damaged = bytearray(path.read_bytes())
    middle = len(damaged) // 2
    damaged[middle : middle + 4000] = b"\xff" * 4000
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="is not finite, and nothing was sent"):
        make(**again).train()
    assert run_sync(served(timeout=5)) == before


@pytest.mark.slow
def test_a_run_whose_folder_has_moved(make, tiny_model_path, tmp_path, monkeypatch):
    """Nothing is written where it was, and a model may be named in another way."""
    make(steps=2).train()
    shutil.move(tmp_path / "run", tmp_path / "moved")
    monkeypatch.chdir(tiny_model_path)
    make(model=".", steps=4, output=tmp_path / "moved", resume=True).train()
    assert not (tmp_path / "run").exists()
    assert set(scalar(tmp_path / "moved", "batch/reward")) == {1, 2, 3, 4}


@pytest.mark.slow
def test_a_run_that_was_interrupted_before_a_checkpoint(make, tmp_path):
    """It begins again in the same object, and leaves what it had written out."""
    run = make(
        steps=3, resume="auto", checkpoint_every=9, eval_prompts=HELD_OUT, eval_every=1
    )
    report, interrupted = run.report, []

    def report_once(metrics):
        report(metrics)
        if run.step == 2 and not interrupted:
            interrupted.append(run.step)
            run.best = 1e9
            raise KeyboardInterrupt

    run.report = report_once
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.train()
    assert interrupted
    assert run.step == 3
    assert run.best < 1e9
    assert [each["step"] for each in run.history] == [0, 1, 2, 3]
    assert "batch/reward" not in run.history[0]
    (path,) = (tmp_path / "run" / "logs").rglob("scalars/eval/reward.csv")
    lines = path.read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["0", "1", "2", "3"]
    steps = Counter(row["step"] for row in rollouts_of(tmp_path / "run"))
    assert steps == dict.fromkeys((1, 2, 3), 16)


def test_numbers_of_numpy(make):
    run = make(steps=np.int64(1), seed=np.int64(3), group_size=np.int32(4))
    run.train()
    assert run.collector.stats()["groups_failed"] == 0


def test_tools(make):
    """Several turns; the template tells of the tools."""
    looked = []

    def search(query: str) -> str:
        """Looks something up.

        Args:
            query: what.
        """
        looked.append(query)
        return "7"

    run = make(
        steps=1,
        tools=[search],
        chat_template=TOOL_TEMPLATE,
        max_turns=3,
        rewards=lambda conversation, task: float(len(conversation.turns)),
    )
    folder = run.train()
    assert run.metrics["batch/turns"] >= 1.0
    assert AutoTokenizer.from_pretrained(folder).chat_template == TOOL_TEMPLATE


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
    return -len(said) / 10


def test_agents(make, restored_engine, tmp_path, capsys):
    run = make(
        rewards=None,
        agent=greet,
        steps=2,
        eval_prompts=HELD_OUT,
        eval_every=1,
        packing="tree",
    )
    run.train()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert difference(restored_engine, trained) < TOLERANCE
    assert max(scalar(tmp_path / "run", "train/kl_approx").values()) < 5e-6
    assert min(scalar(tmp_path / "run", "train/tree_ratio").values()) > 1
    rows = rollouts_of(tmp_path / "run")
    said = re.compile(r"assistant: .*\nuser: Go on\.\nassistant: .*", re.DOTALL)
    assert all(said.fullmatch(row["response"]) for row in rows)
    assert all(row["policy_version"] >= 0 for row in rows)
    # A text with an apostrophe is quoted with the other kind.
    assert re.search(r"-> ['\"]assistant: ", capsys.readouterr().out)


@pytest.mark.slow
def test_tensorboard_and_another_logger_afterwards(make, restored_engine, tmp_path):
    """Several epochs and minibatches, an entropy bonus, and arguments of parts."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = {
        "max_staleness": 1,
        "correction": "decoupled_token_is",
        "loss": {"entropy_bonus": True, "entropy_coeff": 0.01},
        "optimizer": {"eps": 1e-4, "weight_decay": 0.1},
        "weight_sync": {"verify": True},
        "minibatches": 2,
        "epochs_per_batch": 2,
    }
    run = make(logger="tensorboard", **arguments)
    folder = run.train()
    assert run.learner.steps == 12
    defaults = run.learner.optimizer.defaults
    assert (defaults["eps"], defaults["weight_decay"]) == (1e-4, 0.1)
    trained = AutoModelForCausalLM.from_pretrained(folder)
    assert difference(restored_engine, trained) < TOLERANCE
    # Below it is a folder of hyperparameters.
    folders = {path.parent for path in (tmp_path / "run").rglob("events.*")}
    events = EventAccumulator(str(min(folders, key=lambda path: len(path.parts))))
    events.Reload()
    names = {*events.Tags()["scalars"]}
    assert {"batch/reward", "train/entropy", "rollout_corr/rollout_is_mean"} <= names
    make(logger="csv", resume=True, steps=4, **arguments).train()
    assert list(scalar(tmp_path / "run", "batch/reward")) == [4]


@pytest.mark.parametrize("logger", ["wandb", "tensorboard"])
def test_a_logger_that_is_not_installed(make, monkeypatch, tiny_model_path, logger):
    monkeypatch.setitem(sys.modules, logger, None)
    launcher = FakeLauncher(tiny_model_path, 1)
    # The second time as the first one.
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="logger='csv'"):
            make(logger=logger, engine={"launcher": launcher}).train()
    assert launcher.handles == [], "Servers were started."


def test_parts_that_are_given(make, tmp_path):
    """A loss, an optimizer, a filter, an advantage and arguments of the collector."""
    made = []

    def make_loss(actor):
        made.append("loss")
        return CorrectedGRPOLoss(actor, clip_epsilon=0.1, entropy_bonus=False)

    def make_optimizer(parameters):
        made.append("optimizer")
        return torch.optim.SGD(parameters, lr=0.1)

    def trl(completions, number, **columns):
        made.append("reward")
        assert len({*number}) == 1
        return [float(len(text)) for text in completions]

    run = make(
        loss=make_loss,
        optimizer=make_optimizer,
        lr=None,
        rewards=trl,
        advantage=lambda returns: returns - returns.amax(-1, keepdim=True),
        keep_group=has_variance,
        collector={"max_in_flight": 8},
        logger=None,
        steps=1,
    )
    run.train()
    assert {*made} == {"loss", "optimizer", "reward"}
    assert run.metrics["batch/flat_groups"] == 0.0
    assert not (tmp_path / "run" / "logs").exists()


def test_a_run_that_is_scraped_and_logs_figures(make, tmp_path):
    pytest.importorskip("prometheus_client")
    scraped = []

    def scrape(conversation, task):
        with urllib.request.urlopen(run.metrics_endpoint.url, timeout=60) as answer:
            scraped.append(answer.read().decode())
        return 1.0

    run = make(rewards=scrape, metrics_port=0, steps=1, group_size=2)
    run.train()
    for part in ("engine", "collector", "weights"):
        assert f'torchrl_sglang_up{{part="{part}"}} 1.0' in scraped[-1]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(run.metrics_endpoint.url, timeout=60)
    folder = tmp_path / "run"
    # The first weights, and those of the step.
    assert scalar(folder, "weights/updates") == {1: 2.0}
    assert scalar(folder, "engine/servers_serving") == {1: 1.0}
    assert scalar(folder, "engine/responses")[1] >= 8
    assert scalar(folder, "staleness/tokens_max") == {1: 0.0}
    assert scalar(folder, "rollout/groups_failed") == {1: 0.0}


def test_overlong_responses_are_punished():
    class Conversation:
        def __init__(self, count):
            self.turns = [type("Turn", (), {"token_ids": [0] * count})]

    punish = overlong_penalty(100, 20)
    found = [punish(Conversation(count), {}) for count in (1, 80, 90, 100, 120)]
    assert found == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ConfigurationError, match="margin"):
        overlong_penalty(10, 11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": None}, "Give the prompts"),
        ({"group_size": 1}, "group_size"),
        ({"correction": "decoupled"}, "decoupled"),
        ({"method": "dapos"}, "Did you mean 'dapo'"),
        ({"advantage": "centred"}, "Did you mean 'centered'"),
        ({"steps": 3, "epochs": 2}, "say twice when to end"),
        ({"colocated": True, "max_staleness": 1}, "max_staleness=1 has no use"),
        (
            {"collector": lambda policy: None},
            "rewards and prompts cannot be given beside it",
        ),
        ({"resume": "always"}, "resume"),
        ({"steps": None, "prompts": iter(PROMPTS), "epochs": 2}, "iterator ends"),
        ({"metrics_port": 99_999}, "metrics_port must be a port"),
        ({"minibatches": 0}, "minibatches"),
        ({"keep_checkpoints": 0}, "keep_checkpoints"),
        ({"lr": "fast"}, "lr='fast' and optimizer=None make no AdamW"),
        ({"optimizer": {"epss": 1}}, "unexpected keyword argument 'epss'"),
        ({"prompts": []}, "prompts is empty"),
        ({"loss": {"clip_epsilom": 2}}, "Did you mean 'clip_epsilon'"),
        ({"packing": "yes"}, "packing must be 'auto', 'tree', True or False, got"),
        ({"packing": True, "loss": lambda actor: None}, "give it there"),
        ({"dtype": "float16"}, "dtype='float16' is no type that weights"),
        ({"attn_implementation": "flush"}, "attn_implementation='flush' is not one"),
        ({"engine": []}, "or an engine, got []"),
        ({"engine": {"num_replica": 2}}, "num_replica"),
        ({"weight_sync": {"pause_mod": "abort"}}, "Did you mean 'pause_mode'"),
        ({"weight_sync": {"transport": "post"}}, "transport='post' is not one of"),
        ({"collector": {"group_size": 3}}, "which a run sets by arguments of GRPO"),
        ({"prompts": [{"query": "a", "advantage": 1}]}, "a column 'advantage'"),
        ({"prompts": TakenColumn()}, "A task has a column 'advantage'"),
        ({"collector": {"groups": 1}}, "groups by rewards, env or agent"),
        ({"collector": {"request_order": "longest"}}, "not one of 'arrival', 'oldest'"),
        ({"collector": {"max_in_flight": 0}}, "at least 1, got 0"),
        ({"collector": {"timeouts": {"engine": 3}}}, "timeouts must be CollectorTime"),
        ({"collector": {"postproc": 3}}, "postproc must be a function"),
        ({"collector": {"replay_buffer": object()}}, "trains on batches as they come"),
        ({"gateway": {"max_session": 1}}, "Did you mean 'max_sessions'"),
        ({"optimizer": "adam"}, "optimizer must be a mapping of arguments or"),
        ({"agent": greet}, "rewards cannot be given with agent"),
        ({"generate_kwargs": {"temperature": math.nan}}, "out of range"),
        ({"generate_kwargs": {"top_p": 2.0}}, "top_p=2.0 is out of range"),
        ({"generate_kwargs": {"top_k": 0}}, "top_k=0 keeps no token"),
        ({"generate_kwargs": {"stop_token_ids": "2"}}, "stop_token_ids"),
        ({"generate_kwargs": {"max_tokens": 4, "max_new_tokens": 4}}, "once"),
        ({"loss": {"clip_epsilon": math.nan}}, "clip_epsilon must be a"),
        ({"loss": {"aggregation": "none"}}, "leaves the average to the caller"),
        ({"loss": {"kl_to_ref_coeff": 0.1}}, "give kl_to_ref_coeff=... to GRPO"),
        ({"lora": {"r": 0}}, "r of lora must be an integer of at least 1, got 0"),
        ({"lora": {"r": "8"}}, "r of lora must be an integer"),
        ({"engine": {"model": "x"}}, "engine has 'model', and servers serve"),
        ({"chat_template": "{% for m in messages %}"}, "one of Jinja's: Unex"),
        ({"chat_template": "{% break %}"}, "chat_template is not one of Jinja's"),
        ({"generate_kwargs": {5: 1}}, "generate_kwargs has the name 5"),
        ({"engine": {"environment": {"A": 1}}}, "environment has 'A': 1"),
        ({"lora": {"target_modules": ["nope"]}}, "makes no adapter of this model"),
        ({"prompts": Broken()}, "first task of prompts cannot be read: OSError"),
        ({"prompts": [None]}, "A task must be a text, a mapping or a TensorDict"),
        ({"prompts": Columns()}, "has no 'query'; it has 'text'"),
        ({"prompts": Table([1])}, "table.to_dict('records')"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(map(str, value)),
)
def test_invalid_arguments_are_refused(engine, make_on, arguments, message):
    with pytest.raises((ConfigurationError, CollectionError)) as caught:
        make_on(**{"engine": engine, **arguments}).train()
    assert message in str(caught.value)


def test_held_out_prompts_of_an_iterator(make):
    run = make(eval_prompts=iter(HELD_OUT), eval_every=1, steps=2, logger=None)
    run.train()
    assert run.metrics["eval/reward"] is not None


def test_two_runs_in_one_folder(make, tmp_path):
    first, second = make(steps=1), make(steps=1, resume="auto")
    with first:
        with pytest.raises(ConfigurationError, match="this process; .* output"):
            second.train()
        with pytest.raises(
            ConfigurationError, match="begun already. Within its `with`"
        ):
            first.train()
    second.train()


def test_servers_are_woken_up_where_training_fails():
    calls = []

    class Engine:
        def sleep(self, tags):
            calls.append("sleep")

        def wake_up(self, tags=None):
            calls.append("wake up")

    run = SimpleNamespace(
        colocated=True,
        engine=Engine(),
        ranks=TrainerRanks(),
        clock=PhaseClock(),
        arguments=SimpleNamespace(lora=None),
        _released=ReleasedMemory(TrainerRanks(), None),
        _begin_phase=lambda phase: None,
    )
    with pytest.raises(KeyError), Run.memory_for_training(run):
        raise KeyError
    assert calls == ["sleep", "wake up"]


def test_a_model_needs_its_engine(hf_model, restored_engine, tmp_path):
    with pytest.raises(ConfigurationError, match="give the engine that serves it"):
        GRPO(hf_model, prompts=PROMPTS, rewards=few_tokens, output=tmp_path)
    run = GRPO(
        hf_model,
        prompts=PROMPTS,
        rewards=few_tokens,
        engine=restored_engine,
        generate_kwargs={"max_new_tokens": 4},
        group_size=2,
        groups_per_batch=2,
        steps=1,
        output=tmp_path,
    )
    run.train()
    assert difference(restored_engine, hf_model) < TOLERANCE


def test_nccl_is_prepared_before_the_model_is_shared(make, monkeypatch):
    """Ranks that share a model make a communicator, which is too late for it."""
    calls = []

    def load(training, ranks):
        calls.append("load")
        raise ConfigurationError("enough")

    monkeypatch.setattr(Training, "load", load)
    monkeypatch.setattr(run_module, "prepare_nccl", calls.append)
    with pytest.raises(ConfigurationError, match="enough"):
        make().train()
    assert calls == [ServerArgs(device="cpu"), "load"]


@pytest.mark.slow
def test_ranks_of_torchrun_and_another_number_afterwards(
    restored_engine, tiny_model_path, tmp_path
):
    """One run: FSDP2 over two ranks, then alone, from the same folder."""
    arguments = [tiny_model_path, restored_engine.server_url, tmp_path / "run"]
    printed = run_ranks(PROGRAM, *arguments, 3, folder=tmp_path)
    assert len(re.findall(r"^step \d+/3: reward", printed, re.MULTILINE)) == 3
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert difference(restored_engine, trained) < TOLERANCE
    assert max(scalar(tmp_path / "run", "train/kl_approx").values()) < 5e-6
    # The log-probs of both ranks' shares are recorded.
    recording = Recording.open(tmp_path / "run")
    (seen,) = read_runs([recording])
    turns = [
        turn
        for group in seen.groups
        for response in conversations_of(recording, group)["responses"]
        for turn in response["turns"]
    ]
    assert len(turns) == 48
    assert all(len(turn["trainer"]) == turn["count"] for turn in turns)
    printed = run_ranks(PROGRAM, *arguments, 6, ranks=1, folder=tmp_path)
    assert "goes on after step 3" in printed
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert difference(restored_engine, trained) < TOLERANCE
    rows = rollouts_of(tmp_path / "run")
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, 7), 16)
    assert Counter(row["prompt"] for row in rows) == {
        each["query"]: 4 for each in PROMPTS
    }


@pytest.mark.slow
def test_runs_of_the_same_ranks(restored_engine, tiny_model_path, tmp_path):
    """The second one is of a model that the ranks share out.

    What the first one's ranks told each other by is closed.
    """
    program = PROGRAM.with_name("two_runs_program.py")
    run_ranks(program, tiny_model_path, restored_engine.server_url, tmp_path)
    for name in ("of_a_path", "given"):
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        assert set(scalar(tmp_path / name, "batch/reward")) == {1, 2}
    assert difference(restored_engine, trained) < TOLERANCE
    for rank in (0, 1):
        open_after = [
            int((tmp_path / f"sockets_{name}_{rank}").read_text())
            for name in ("of_a_path", "given")
        ]
        assert open_after[0] == open_after[1]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[3], [1, 5]])
def test_a_run_that_is_killed(restored_engine, tiny_model_path, tmp_path, kills):
    """No prompt is lost or repeated, and no step is logged twice."""
    folder = tmp_path / "run"
    command = [trainer_python(), str(PROGRAM), tiny_model_path]
    command += [restored_engine.server_url, str(folder), "12", '{"max_staleness": 1}']
    for step in (*kills, None):
        with (tmp_path / "log.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
        if step is None:
            assert process.wait(LIMIT_SECONDS) == 0, (tmp_path / "log.txt").read_text()
            break
        wait_for_text(tmp_path / "log.txt", f"step {step}/12", process)
        # The program itself, which would end a moment after who has asked for it.
        os.kill(forked_process(process.pid), signal.SIGKILL)
        process.wait()
    rows = rollouts_of(folder)
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, 13), 16)
    assert Counter(row["prompt"] for row in rows) == {
        each["query"]: 8 for each in PROMPTS
    }
    assert list(scalar(folder, "batch/reward")) == list(range(1, 13))
    trained = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert difference(restored_engine, trained) < TOLERANCE
