"""Conversations of several turns in ChatEnv, with a tool that answers between them."""

from __future__ import annotations

import copy
import itertools
import string

import pytest
import torch
from helpers.collecting import LengthReply
from tensordict import TensorDict
from torchrl.envs.llm import ChatEnv

from torchrl_sglang import SGLangWrapper

TURNS = 3


@pytest.mark.parametrize(
    ("with_tokenizer", "pad_output"),
    # TorchRL's IncrementalTokenizer cannot read the ragged tokens of a batch.
    [(False, False), (False, True), (True, True)],
)
def test_tool_use(engine, tokenizer, with_tokenizer, pad_output):
    """Prompts of different lengths; every turn continues the tokens of the last."""
    tokenizer = copy.deepcopy(tokenizer)
    # Text that is one token when it is tokenized, and may be generated as two.
    tokenizer.add_tokens([a + b for a, b in itertools.product(string.digits, repeat=2)])
    env = ChatEnv(
        batch_size=(2,),
        tokenizer=tokenizer,
        input_mode="history",
        with_tokenizer=with_tokenizer,
    ).append_transform(LengthReply())
    digit = tokenizer.convert_tokens_to_ids("1")
    policy = SGLangWrapper(
        engine,
        tokenizer=tokenizer,
        prefer_tokens=True,
        pad_output=pad_output,
        generate_kwargs={"max_new_tokens": 6, "logit_bias": {digit: 20.0}},
    )
    td = env.reset(TensorDict(query=["hi", "how are you?"], batch_size=(2,)))
    before: list[list[int]] = [[], []]
    for turn in range(TURNS):
        td = policy(td)
        for index in range(2):
            mask = column(td, "masks", "all_attention_mask", index)
            answer = column(td, "masks", "all_assistant_mask", index)[mask]
            full = column(td, "tokens", "full", index)[mask].tolist()
            log_probs = column(td, "log_probs", "full", index)[mask]
            # Had the model's "11" been tokenized again, the engine would have refused
            # the new token, which is not in its vocabulary.
            assert full[: len(before[index])] == before[index]
            assert full.count(digit) >= 2
            messages = td["history"].full[index].content
            assert len(messages) == 2 * (turn + 1)
            prompt = tokenizer.decode(full[: len(full) - int(answer.sum())])
            assert prompt == td["text"].prompt[index]
            assert not log_probs[answer].isnan().any()
            before[index] = full
        _, td = env.step_and_maybe_reset(td)


def column(td, container, field, index) -> torch.Tensor:
    return td.get((container, field), as_list=True)[index]
