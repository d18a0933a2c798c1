"""What a run makes of its arguments before anything is started."""

from __future__ import annotations

import inspect
from functools import partial

import pytest

from torchrl_sglang import GRPO
from torchrl_sglang.errors import ConfigurationError

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
