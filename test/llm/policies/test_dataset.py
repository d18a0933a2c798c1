"""Batches as datasets with TRL's names, and back, from a real engine."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text

from torchrl_sglang import (
    CorrectedGRPOLoss,
    SGLangWrapper,
    batch_to_dataset,
    dataset_to_batch,
)
from torchrl_sglang.errors import ConfigurationError

TEXTS = ["hi", "what is 2+2?", "x"]
PARAMS = {"max_new_tokens": 6, "temperature": 0.0}


def generate(engine, tokenizer, mode="history", **arguments):
    size = (len(TEXTS),)
    if mode == "text":
        prompts = TensorDict(text=Text(prompt=list(TEXTS), batch_size=size))
    else:
        chats = [[{"role": "user", "content": text}] for text in TEXTS]
        prompt = History.from_chats(chats)
        prompts = TensorDict(history=ChatHistory(prompt=prompt, batch_size=size))
    prompts.batch_size = size
    policy = SGLangWrapper(
        engine,
        tokenizer=tokenizer,
        input_mode=mode,
        generate_kwargs=PARAMS,
        return_log_probs=True,
        **arguments,
    )
    batch = policy(prompts)
    batch["next"] = TensorDict(
        reward=torch.tensor([1.0, 0.0, 2.0]).view(3, 1, 1),
        accuracy=torch.tensor([0.5, 0.0, 1.0]).view(3, 1, 1),
        done=torch.tensor([True, True, False]).view(3, 1),
        terminated=torch.tensor([True, False, False]).view(3, 1),
        truncated=torch.tensor([False, True, False]).view(3, 1),
        batch_size=size,
    )
    batch["answer"] = ["a", "b", "c"]
    return batch


def leaves_of(row):
    return {
        key: row.get(key) for key in row.keys(include_nested=True, leaves_only=True)
    }


def check_equal(first, second):
    assert len(first) == len(second)
    for one, other in zip(first.unbind(0), second.unbind(0), strict=True):
        expected, found = leaves_of(one), leaves_of(other)
        assert set(expected) <= set(found)
        for key, value in expected.items():
            if not isinstance(value, torch.Tensor):
                assert getattr(found[key], "data", found[key]) == getattr(
                    value, "data", value
                ), key
                continue
            assert found[key].dtype == value.dtype, key
            torch.testing.assert_close(
                found[key], value, rtol=0, atol=0, equal_nan=True, msg=str(key)
            )


@pytest.mark.parametrize("mode", ["history", "text"])
def test_a_batch_comes_back_from_a_file_unchanged(engine, tokenizer, tmp_path, mode):
    batch = generate(engine, tokenizer, mode)
    batch_to_dataset(batch).to_parquet(tmp_path / "rows.parquet")
    dataset = Dataset.from_parquet(str(tmp_path / "rows.parquet"))
    check_equal(batch, dataset_to_batch(dataset))
    assert dataset["reward"] == [1.0, 0.0, 2.0]
    assert dataset["reward.accuracy"] == [0.5, 0.0, 1.0]
    assert dataset["done"] == [True, True, False]
    assert dataset["truncated"] == [False, True, False]
    assert dataset["answer"] == ["a", "b", "c"]


def test_columns_have_the_tokens_and_log_probs_of_each_row(engine, tokenizer):
    batch = generate(engine, tokenizer)
    dataset = batch_to_dataset(batch)
    for row, source in zip(dataset, batch.unbind(0), strict=True):
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert row["completion"][0]["role"] == "assistant"
        ids = row["prompt_ids"] + row["completion_ids"]
        assert ids == source["tokens", "full"].tolist()
        assert row["env_mask"] == [1] * len(row["completion_ids"])
        expected = source["log_probs", "response"].tolist()
        assert row["logprobs"] == pytest.approx(expected, abs=1e-7)


def test_padding_is_removed(engine, tokenizer):
    batch = generate(engine, tokenizer, pad_output=True)
    batch["token_policy_version"] = torch.zeros_like(batch["tokens", "response"])
    padded = batch_to_dataset(batch)
    assert list(map(len, padded["token_policy_version"])) == [
        len(ids) for ids in padded["completion_ids"]
    ]
    dense = batch_to_dataset(generate(engine, tokenizer))
    for name in ("prompt_ids", "completion_ids", "env_mask", "completion"):
        assert padded[name] == dense[name], name


def test_a_loss_of_the_rows_is_that_of_the_batch(engine, tokenizer):
    from torchrl.modules.llm import TransformersWrapper

    from torchrl_sglang.testing.tiny_model import make_tiny_model

    model = make_tiny_model(tokenizer)
    trained = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
    )
    loss = CorrectedGRPOLoss(trained, masking_strategy="rlhf")
    batch = generate(engine, tokenizer)
    losses = []
    for rows in (batch, dataset_to_batch(batch_to_dataset(batch))):
        rows["advantage"] = torch.tensor([1.0, -1.0, 0.5]).view(3, 1, 1)
        losses.append(loss(rows).loss_objective.item())
    assert losses[0] == losses[1]


def test_a_column_of_the_batch_keeps_its_name_and_its_value(engine, tokenizer):
    batch = generate(engine, tokenizer)
    batch["prompt"] = ["a", "b", "c"]
    batch["deep", "a", "b"] = torch.arange(3)
    batch["reward", "accuracy"] = torch.arange(3)
    dataset = batch_to_dataset(batch)
    assert dataset["batch.prompt"] == ["a", "b", "c"]
    assert dataset["batch.reward.accuracy"] == [0, 1, 2]
    assert dataset["prompt"][0][0]["role"] == "user"
    check_equal(batch, dataset_to_batch(dataset))


def test_calls_in_some_messages_are_no_obstacle(engine, tokenizer):
    batch = generate(engine, tokenizer)
    call = {"function": {"name": "add", "arguments": {}}}
    rows = list(batch.unbind(0))
    said = History.from_chats(
        [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    )[0]
    said[1].set("tool_calls", NonTensorData([call]))
    rows[0]["history"].full = said
    assert len(batch_to_dataset(lazy_stack(rows))) == 3


def test_a_vector_as_long_as_a_padded_response_is_whole(engine, tokenizer):
    batch = generate(engine, tokenizer, pad_output=True)
    width = batch["tokens", "response"].shape[-1]
    batch["embedding"] = torch.arange(3 * width).view(3, width)
    assert batch_to_dataset(batch)["embedding"] == batch["embedding"].tolist()


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ConfigurationError, match="no rows"):
        batch_to_dataset(TensorDict(batch_size=[0]))


def test_a_batch_without_tokens_is_refused():
    with pytest.raises(ConfigurationError, match="tokens, masks and log-probs"):
        batch_to_dataset(TensorDict(a=torch.ones(2), batch_size=2))


def test_a_row_of_another_library_is_a_whole_conversation():
    columns = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "reward")
    row = dict(zip(columns, ([1], [2, 3], [1, 1], [-0.5, -1.0], 1.0), strict=True))
    rows = [{**row, "truncated": is_cut} for is_cut in (None, True)]
    batch = dataset_to_batch(Dataset.from_list(rows))
    assert batch["next", "done"].all()
    assert batch["next", "terminated"].flatten().tolist() == [True, False]
    assert batch["next", "truncated"].flatten().tolist() == [False, True]


def test_a_dataset_without_ids_is_refused():
    with pytest.raises(ConfigurationError, match="prompt_ids"):
        dataset_to_batch(Dataset.from_dict({"prompt": ["a"]}))
