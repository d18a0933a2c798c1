"""What a run makes of its arguments before anything is started."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import re
import shutil
import warnings
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from helpers.chat_families import family_tokenizer
from helpers.collecting import collection_of

from torchrl_sglang import (
    GRPO,
    AsyncLLMCollector,
    CorrectedGRPOLoss,
    GroupAdvantage,
    Learner,
)
from torchrl_sglang.backends.launch.cpu import engine_python
from torchrl_sglang.backends.launch.server_command import find_flags
from torchrl_sglang.collectors.runtime.columns import (
    POLICY_COLUMNS,
    ROW_COLUMNS,
    TURN_COLUMNS,
)
from torchrl_sglang.collectors.scheduling.prompts import make_prompts
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.programs.program import _find_folder
from torchrl_sglang.gateway.store import Store
from torchrl_sglang.recording.format import find_recording
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.requests.sampling import SAMPLING_PARAMETERS
from torchrl_sglang.support.counterparts import PEFT, TORCH, TORCHRL, TRL, VERL
from torchrl_sglang.trainers.arguments import RunArguments
from torchrl_sglang.trainers.records import check_folder
from torchrl_sglang.weight_update.transports.disk import DiskOptions

PROMPTS = [{"query": "Say 1."}]


def brief(conversation, task):
    return -len(conversation.response)


def of_trl(completions, gold, **columns):
    return [0.0] * len(completions)


def of_trl_with_more(prompts, completions, gold, level=1):
    return [0.0] * len(completions)


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0


async def agent(task, *, base_url, api_key):
    return 0.0


GIVEN = {"prompts": PROMPTS, "rewards": {"short": brief}}
AGENT = {"rewards": None, "agent": agent}
ENV = {"rewards": None, "env": lambda: None}


def test_a_logger_is_told_of_arguments_alone(tmp_path):
    run = GRPO(
        "model",
        prompts=PROMPTS,
        rewards=brief,
        lora={"r": 8},
        engine={"api_key": "secret", "environment": {"HF_TOKEN": "hf_1", "A": "b"}},
        output=tmp_path,
    )
    told = run.hyperparameters
    assert {name.partition(".")[0] for name in told} < {
        *inspect.signature(GRPO).parameters
    }
    assert told["rewards"] == "brief"
    assert told["lora.r"] == 8
    assert told["engine.api_key"] == "***"
    assert told["engine.environment.HF_TOKEN"] == "***"
    assert told["engine.environment.A"] == "***"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": "rows.jsonl"}, "got 'rows.jsonl'; read a file first"),
        ({"eval_prompts": "rows.jsonl"}, "eval_prompts must be a list"),
        ({"rewards": None}, "nothing to learn from: give rewards"),
        ({"rewards": "brief"}, "rewards takes a function"),
        ({"rewards": {"brief": (brief, "0.5")}}, "the weight of 'brief'"),
        ({"group_rewards": lambda conversations: [1.0]}, "task"),
        ({"step": lambda conversation: None}, "task"),
        ({"step": 3}, "step=3 must be a function"),
        ({"output": None}, "output must be a folder's path"),
        ({"chat_template": "chat.jinja"}, "give the text of a file"),
        ({"system_prompt": 3}, "system_prompt must be a text"),
        ({"minibatches": 200}, "more than the 128 responses"),
        ({"prompts": 3}, "prompts must be a list"),
        ({"engine": 3}, "engine must be arguments of"),
        ({"lora": 16}, "lora must be a mapping of arguments, got 16"),
        ({"loss": 3}, "loss must be a mapping of arguments or a function"),
        ({"gateway": {"port": 1}}, "give an agent, too"),
        ({"tools": brief}, "tools takes a list of functions"),
        ({"tools": ["search"]}, "must be a function"),
        ({"tools": [brief, brief]}, "has the name of another one"),
        ({"tools": [partial(brief)]}, "has no name of its own"),
        ({"tools": {5: brief}}, "tools has the name 5, which must be a text"),
        ({"tools": {"a": (brief, "x")}}, r"a function, or a pair of it and its JSON"),
        ({"tools": {"a": (brief, {}, 1)}}, r"a function, or a pair of it and its JSON"),
        ({"tools": {"a": (brief, {"function": None})}}, "whose 'function' is no"),
        ({"max_turns": 0}, "max_turns must be"),
        ({"keep_group": "has_variance"}, "keep_group='has_variance'"),
        ({"on_stale": "retri"}, "'retry'"),
        ({"generate_kwargs": {"max_token": 8}}, "Did you mean 'max_tokens'"),
        ({"generate_kwargs": {"n": 8}}, "group_size"),
        ({"lora": {"rank": 8}}, "lora has no argument 'rank'"),
        # A negative norm would turn the gradient round.
        ({"clip_grad_norm": -1.0}, "clip_grad_norm must be a positive"),
        ({"kl_to_ref_coeff": "0.1"}, "kl_to_ref_coeff must be"),
        ({"logger": "tb"}, "logger='tb' is not one of csv"),
        ({"logger": ["csv"]}, "is not one of csv"),
        ({"engine": {"max_runing_requests": 8}}, "max_running_requests"),
        ({"model": "./nowhere"}, "There is no model folder './nowhere'"),
        ({"model": "localhost:8000"}, "'localhost:8000' is an address, not a model"),
        ({"model": "http://a:b@c"}, r"'http://\*\*\*@c' is an address"),
        ({"model": ""}, "model must be a folder or a hub name, got ''"),
        ({"prompts": [{"text": "a"}]}, "The first task of prompts has no 'query'"),
        ({"prompts": ["a", {"q": "b"}]}, "Task 1 of prompts has no 'query'"),
        ({"prompts": ["a", 3]}, "A task must be a text"),
        ({"prompts": [*PROMPTS, {"query": "a", "text": "b"}]}, "Task 1 .* 'text'"),
        ({"eval_prompts": [{"query": "a", "reward": 1}]}, "eval_prompts .* 'reward'"),
        ({"prompts": [*PROMPTS, {"query": "a", "short": 1}]}, "Task 1 .* 'short'"),
        ({"prompts": Dataset.from_list([{"query": "a", "next": 1}])}, "'next'"),
        ({"prompts": [{"query": "a", "tokens": 1}], **AGENT}, "'tokens'"),
        ({"prompts": [{"query": "a", "text": 1}], **ENV}, "'text'"),
        ({"rewards": of_trl}, "needs the column 'gold', and the task has 'query'"),
        ({"rewards": [brief, of_trl_with_more]}, "needs the column 'gold'"),
        ({"prompts": [{"query": "a", "gold": 1}, "b"], "rewards": of_trl}, "'gold'"),
        ({"group_rewards": {"gold": of_trl}}, "needs the column 'gold'"),
        ({"rewards": of_verl}, "needs 'ground_truth', or 'reward_model'"),
    ],
)
def test_invalid_arguments_are_refused_before_servers_start(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        GRPO(**{"model": "model", **GIVEN, **wrong})


@pytest.mark.parametrize(
    "given",
    [
        # What an agent reads is its own, and so is the text of its rows.
        {"prompts": [{"text": "a"}], **AGENT},
        {"prompts": [{"query": "a", "gold": 1}], "rewards": of_trl},
        {"prompts": [{"query": "a", "reward_model": {}}], "rewards": of_verl},
        {"prompts": iter(["a"]), "rewards": of_trl},
    ],
)
def test_tasks_that_are_not_refused(given):
    GRPO("model", **{**GIVEN, **given})


class NoServers:
    """A placement that starts nothing."""

    error = "no servers here"
    are_wanted = False

    def bind(self, num_replicas, spec, **options):
        self.are_wanted = True
        raise ConfigurationError(self.error)


@pytest.mark.parametrize(
    ("family", "wrong", "error"),
    [
        (None, {}, "no chat template"),
        ("gemma2", {"system_prompt": "Be brief."}, "There is no system role"),
        ("gemma2", {"chat_template_kwargs": {"thinks": True}}, "no variable of the"),
        ("gemma2", {}, "no servers here"),
    ],
)
def test_the_chat_template_is_applied_before_servers_start(
    family, wrong, error, tokenizer, tiny_model_path, tmp_path
):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = copy.deepcopy(tokenizer)
    source = family and family_tokenizer(family).chat_template
    tokenizer.chat_template = source
    tokenizer.save_pretrained(model)
    servers = NoServers()
    run = GRPO(
        model,
        **{**GIVEN, **wrong},
        engine={"launcher": servers},
        output=tmp_path / "run",
    )
    with pytest.raises(ConfigurationError, match=error), run:
        pass
    assert servers.are_wanted is (error == servers.error)


def test_columns_that_a_run_takes_for_taken(fake_engine, tiny_model_path, tmp_path):
    run = GRPO(tiny_model_path, **GIVEN, engine=fake_engine, output=tmp_path)
    with run:
        columns = collection_of(run.collector).groups._columns
    assert columns == ROW_COLUMNS | POLICY_COLUMNS | TURN_COLUMNS | {"short"}


def test_old_tokens_without_a_correction_are_told_of():
    with pytest.warns(
        RuntimeWarning, match="give correction='decoupled_token_is'"
    ) as caught:
        GRPO("model", **GIVEN, max_staleness=1)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GRPO("model", **GIVEN, max_staleness=1, correction="decoupled_token_is")
        GRPO("model", **GIVEN, max_staleness=1, loss=CorrectedGRPOLoss)


def test_greedy_groups_are_told_of():
    with pytest.warns(RuntimeWarning, match="teaches nothing") as caught:
        GRPO("model", **GIVEN, generate_kwargs={"temperature": 0.0})
    assert caught[0].filename == __file__


def test_the_length_of_responses_has_one_meaning_under_both_names():
    run = GRPO(
        "model", prompts=PROMPTS, rewards=brief, generate_kwargs={"max_tokens": 8}
    )
    assert run.sampling == {"max_new_tokens": 8, "temperature": 1.0}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    run = GRPO("model", prompts=PROMPTS, rewards=brief, output=tmp_path / "file")
    with pytest.raises(ConfigurationError, match="Give another output"):
        run.train()


def names_of(*callables):
    return {name for each in callables for name in inspect.signature(each).parameters}


ARGUMENTS = names_of(GRPO)
INNER = {
    "generate_kwargs": {*SAMPLING_PARAMETERS},
    "loss": names_of(CorrectedGRPOLoss, CorrectedGRPOLoss.__mro__[1]),
    "lora": names_of(pytest.importorskip("peft").LoraConfig),
    "optimizer": names_of(torch.optim.AdamW),
    "rewards": {"name"},
}


def test_counterparts_of_other_libraries_names_are_arguments():
    inner = INNER | {"engine": {*find_flags(str(engine_python()), os.environ)}}
    offenders = []
    for written in sorted({*TRL.values(), *VERL.values()}):
        code = written if "=" in written else f"{written}=..."
        (keyword,) = ast.parse(f"f({code})").body[0].value.keywords
        keys = getattr(keyword.value, "keys", ())
        if keyword.arg not in ARGUMENTS or (
            keys and not {key.value for key in keys} <= inner[keyword.arg]
        ):
            offenders.append(written)
    assert offenders == []


def test_no_name_of_another_library_is_an_argument():
    assert not ARGUMENTS & {*TRL, *VERL, *TORCHRL}
    assert {*PEFT.values()} <= INNER["lora"]
    assert not INNER["lora"] & {*PEFT}


def test_names_of_other_libraries_are_refused_with_their_counterparts():
    offenders = []
    for kind, name, counterpart in [
        *((GRPO, name, TRL[name]) for name in TRL),
        *((GRPO, name, VERL[name]) for name in VERL if name not in TRL),
        (GroupAdvantage, "grpo_size", "group_size=..."),
        (AsyncLLMCollector, "repeats", "group_size=..."),
        (AsyncLLMCollector, "reward_funcs", "rewards=..."),
        (Learner, "max_grad_norm", "clip_grad_norm=..."),
        (Learner, "num_train_epochs", "epochs=..."),
        (Learner, "learning_rate", "optimizer=..."),
        *((Learner, name, "optimizer=...") for name in TORCH),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            kind(**{name: 1})
        message = str(caught.value)
        begins = message.startswith(f"{kind.__name__} has no argument {name!r}. ")
        if not begins or f"'s {name} is {counterpart}" not in message:
            offenders.append((kind, name, message))
    assert offenders == []


def test_names_of_other_libraries_in_mappings():
    given = {"prompts": PROMPTS, "rewards": brief}
    for wrong, hint in (
        ({"collector": {"repeats": 4}}, "repeats is group_size=..."),
        ({"lora": {"rank": 4}}, "Did you mean 'r'"),
        ({"lora": {"alpha": 4}}, "Did you mean 'lora_alpha'"),
    ):
        with pytest.raises(ConfigurationError, match=hint):
            GRPO("model", **given, **wrong)


@pytest.mark.parametrize(
    "find",
    [
        lambda path: GRPO(path, prompts=PROMPTS, rewards=brief).arguments.model,
        lambda path: GRPO("model", prompts=PROMPTS, rewards=brief, output=path).folder,
        lambda path: RunRecorder(path).folder,
        find_recording,
        lambda path: Store(f"{path}/sessions.db")._path.removesuffix("/sessions.db"),
        _find_folder,
        lambda path: DiskOptions(directory=path).directory,
        lambda path: check_folder("output", Path(path)),
    ],
)
def test_the_home_of_the_user(find, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    assert str(find("~/here")) == str(tmp_path / "here")


@pytest.mark.parametrize("kind", [DatasetDict, IterableDatasetDict])
@pytest.mark.parametrize("name", ["prompts", "eval_prompts"])
def test_all_splits_of_a_dataset(kind, name):
    splits = kind({"train": [], "test": []})
    given = {"prompts": PROMPTS, "rewards": brief, name: splits}
    with pytest.raises(ConfigurationError, match=r"such as dataset\['train'\]"):
        GRPO("model", **given)
    with pytest.raises(ConfigurationError, match=r"such as dataset\['train'\]"):
        make_prompts(splits, query_key="query", shuffle=False, seed=0)


def test_help_has_each_argument_with_its_default():
    signature = inspect.signature(GRPO)
    assert list(signature.parameters) == [field.name for field in fields(RunArguments)]
    for field in fields(RunArguments):
        (text,) = re.findall(
            rf"^ {{8}}{field.name}: (.*(?:\n {{12}}.*)*)", GRPO.__doc__, re.MULTILINE
        )
        parameter, text = signature.parameters[field.name], " ".join(text.split())
        if parameter.default is not parameter.empty:
            assert parameter.default == field.default
        if field.default not in (None, MISSING):
            assert text.endswith(f" Defaults to ``{field.default!r}``."), text
    assert signature.parameters["epochs"].annotation is int


@pytest.mark.parametrize("call", ["begin", "update_weights", "batches"])
def test_parts_of_a_run_are_there_within_its_block(call, tmp_path):
    run = GRPO("model", prompts=PROMPTS, rewards=brief, output=tmp_path)
    with pytest.raises(AttributeError, match=r"within `with run:`, and in train"):
        list(getattr(run, call)() or ())
    assert not hasattr(run, "learner")
    with pytest.raises(AttributeError, match="'nothing'$"):
        run.nothing  # noqa: B018


def test_a_misspelt_name():
    with pytest.raises(ConfigurationError, match="Did you mean 'group_size'"):
        GRPO("model", group_sise=4)


def test_all_names_of_another_library_are_refused_together():
    with pytest.raises(
        ConfigurationError, match=r"lr=\.\.\. .* kl_to_ref_coeff=\.\.\."
    ):
        GRPO("model", learning_rate=1e-6, beta=0.1)


async def waits(*args):
    return args


class Waits:
    async def __call__(self, *args):
        return args


@pytest.mark.parametrize("part", ["loss", "optimizer", "collector", "env"])
def test_coroutine_functions_that_nothing_awaits(part):
    for function in (waits, partial(waits), Waits()):
        with pytest.raises(ConfigurationError, match=f"{part}=.* coroutine function"):
            GRPO("model", **{**GIVEN, part: function})
    GRPO("model", **{**GIVEN, **AGENT, "agent": waits, "loss": CorrectedGRPOLoss})
