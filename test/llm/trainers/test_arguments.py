"""What a run makes of its arguments before anything is started."""

from __future__ import annotations

import ast
import inspect
import os
from functools import partial

import pytest
import torch
from peft import LoraConfig

from torchrl_sglang import (
    GRPO,
    AsyncLLMCollector,
    CorrectedGRPOLoss,
    GroupAdvantage,
    Learner,
)
from torchrl_sglang.backends.launch.cpu import engine_python
from torchrl_sglang.backends.launch.server_command import find_flags
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.requests.sampling import SAMPLING_PARAMETERS
from torchrl_sglang.support.counterparts import PEFT, TORCHRL, TRL, VERL

PROMPTS = [{"query": "Say 1."}]


def brief(conversation, task):
    return -len(conversation.response)


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
    ],
)
def test_what_is_wrong_is_told_before_servers_are_started(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        GRPO("model", **{"prompts": PROMPTS, "rewards": brief, **wrong})


def test_greedy_groups_are_told_of():
    with pytest.warns(RuntimeWarning, match="teaches nothing"):
        GRPO(
            "model",
            prompts=PROMPTS,
            rewards=brief,
            generate_kwargs={"temperature": 0.0},
        )


def test_the_length_of_responses_has_one_meaning_under_both_names():
    run = GRPO(
        "model", prompts=PROMPTS, rewards=brief, generate_kwargs={"max_tokens": 8}
    )
    assert run.sampling == {"max_new_tokens": 8, "temperature": 1.0}


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
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
    "lora": names_of(LoraConfig),
    "optimizer": names_of(torch.optim.AdamW),
    "rewards": {"name"},
}


@pytest.mark.parametrize("written", sorted({*TRL.values(), *VERL.values()}))
def test_counterparts_are_arguments(written):
    code = written if "=" in written else f"{written}=..."
    ((given,)) = ast.parse(f"f({code})").body[0].value.keywords
    assert given.arg in ARGUMENTS
    if isinstance(given.value, ast.Dict):
        inner = {
            **INNER,
            "engine": {*find_flags(str(engine_python()), os.environ)},
        }[given.arg]
        assert {key.value for key in given.value.keys} <= inner


def test_no_name_of_another_library_is_an_argument():
    assert not ARGUMENTS & {*TRL, *VERL, *TORCHRL}
    assert {*PEFT.values()} <= INNER["lora"]
    assert not INNER["lora"] & {*PEFT}


@pytest.mark.parametrize(
    ("kind", "name", "counterpart"),
    [
        *((GRPO, name, TRL[name]) for name in TRL),
        *((GRPO, name, VERL[name]) for name in VERL if name not in TRL),
        (GroupAdvantage, "grpo_size", "group_size=..."),
        (AsyncLLMCollector, "repeats", "group_size=..."),
        (AsyncLLMCollector, "reward_funcs", "rewards=..."),
        (Learner, "max_grad_norm", "clip_grad_norm=..."),
    ],
)
def test_names_of_other_libraries(kind, name, counterpart):
    with pytest.raises(ConfigurationError) as caught:
        kind(**{name: 1})
    said = f"{kind.__name__} has no argument {name!r}. "
    assert str(caught.value).startswith(said)
    assert f"'s {name} is {counterpart}" in str(caught.value)


def test_names_of_other_libraries_in_mappings():
    given = {"prompts": PROMPTS, "rewards": brief}
    for wrong, hint in (
        ({"collector": {"repeats": 4}}, "repeats is group_size=..."),
        ({"lora": {"rank": 4}}, "rank is r=..."),
        ({"lora": {"alpha": 4}}, "alpha is lora_alpha=..."),
    ):
        with pytest.raises(ConfigurationError, match=hint):
            GRPO("model", **given, **wrong)


def test_a_misspelt_name():
    with pytest.raises(ConfigurationError, match="Did you mean 'group_size'"):
        GRPO("model", group_sise=4)
