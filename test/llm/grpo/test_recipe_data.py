"""Problems, answers and rewards of the recipe."""

from __future__ import annotations

import json

import pytest

from torchrl_sglang.errors import ConfigurationError


@pytest.fixture(scope="module")
def data():
    import grpo_data

    return grpo_data


def test_the_problems_of_the_repository(data, compose):
    cfg = compose("sync")
    train, test = data.load_problems(cfg, "train"), data.load_problems(cfg, "test")
    assert (len(train), len(test)) == (48, 16)
    assert not {each["query"] for each in train} & {each["query"] for each in test}
    assert [each["index"] for each in train] == list(range(48))
    assert {each["answer"] for each in train} <= {str(number) for number in range(10)}


def test_other_files(data, compose, tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = [{"question": "How much?", "answer": "6*7=<<6*7=42>>42\n#### 1,042"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    cfg = compose("sync", f"env.dataset={path}", "env.eval_dataset=null")
    assert data.load_problems(cfg, "train") == [
        {"query": "How much?", "answer": "1042", "index": 0}
    ]
    assert data.load_problems(cfg, "test") == []
    # Line ends within texts, as other languages' JSON writes them.
    separators = {"question": "a\u2028b\u2029c\x85d", "answer": "x #### 1"}
    path.write_text(json.dumps(separators, ensure_ascii=False) + "\r\n\n", "utf-8")
    (problem,) = data.load_problems(cfg, "train")
    assert problem["query"] == separators["question"]
    path.write_text(json.dumps({"question": "How much?", "answer": "42"}))
    with pytest.raises(ConfigurationError, match="ends with '#### '"):
        data.load_problems(cfg, "train")
    cfg = compose("sync", "env.dataset=nowhere.jsonl")
    with pytest.raises(ConfigurationError, match="neither 'gsm8k' nor a file"):
        data.load_problems(cfg, "train")


@pytest.mark.parametrize(
    ("form", "text", "answer", "reward"),
    [
        ("tags", "<think>6*7</think> <answer>42</answer>", "42", 1.0),
        ("tags", "<answer>$1,042.0</answer>", "1042", 1.0),
        ("tags", "<answer>41</answer>", "42", 0.1),
        ("tags", "It is 42.", "42", 0.0),
        ("last_number", "6*7 is 42.", "42", 1.0),
        ("last_number", "42, or 43", "42", 0.1),
        ("last_number", "no idea", "42", 0.0),
        ("last_number", "-7", "-7", 1.0),
    ],
)
def test_rewards(data, form, text, answer, reward):
    assert data.grade(text, answer, form=form, format_reward=0.1) == reward
