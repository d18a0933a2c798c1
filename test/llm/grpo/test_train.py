"""``examples/grpo``: a YAML file becomes a run."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
from helpers.forked_starts import trainer_python
from torchrl.envs.llm import GSM8KEnv

from torchrl_sglang import RayLauncher
from torchrl_sglang.errors import ConfigurationError

pytest.importorskip("omegaconf")

FOLDER = Path(__file__).parents[3] / "examples" / "grpo"
CPU, GSM8K = str(FOLDER / "cpu.yaml"), str(FOLDER / "gsm8k.yaml")


@pytest.fixture(scope="module")
def train():
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("train")
    sys.path.remove(str(FOLDER))


@pytest.fixture
def gsm8k(train):
    return importlib.import_module("gsm8k")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments, folder, **environment):
    """Runs the script in a folder."""
    return subprocess.run(
        [trainer_python(), str(FOLDER / "train.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def rows_of(folder):
    return list(map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines()))


def test_the_file_for_a_cpu(train, gsm8k):
    given = train.read_arguments([CPU, "lr=2e-6", "engine.num_replicas=2"])
    assert given["lr"] == 2e-6
    assert given["engine"]["num_replicas"] == 2
    assert given["engine"]["device"] == "cpu"
    assert given["rewards"]["right"] == (gsm8k.right_number, 0.8)
    assert (given["model"] / "config.json").exists()
    training, held_out = given["prompts"], given["eval_prompts"]
    assert (len(training), len(held_out)) == (48, 16)
    assert not {each["query"] for each in training} & {e["query"] for e in held_out}
    assert {each["answer"] for each in training} <= set("0123456789")


def test_the_file_for_gpus(train, gsm8k, monkeypatch):
    asked = []

    def load(path, **options):
        asked.append((path, options))
        return [{"question": "6*7?", "answer": "#### 42"}]

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", load)
    given = train.read_arguments([GSM8K])
    assert asked == [
        ("openai/gsm8k", {"name": "main", "split": split})
        for split in ("train", "test")
    ]
    assert given["prompts"] == [{"query": "6*7?", "answer": "42"}]
    assert given["system_prompt"] == GSM8KEnv.SYSTEM_PROMPT
    train.GRPO(**given)


def test_a_list_takes_the_place_of_a_mapping(train):
    change = "engine=[http://10.0.0.1:30000,http://10.0.0.2:30000]"
    urls = ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
    assert train.read_arguments([CPU, change])["engine"] == urls


def test_functions(train, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def f(*args): pass\ndef g(*args): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("mine")
    changes = [
        "rewards=mine:f",
        "tools=[mine:f, mine:g]",
        "agent=mine:f",
        "loss=mine:g",
        "advantage=mine:g",
        "optimizer.eps=1e-4",
        "keep_group=torchrl_sglang:has_variance",
        "engine.launcher={strategy: SPREAD}",
    ]
    given = train.read_arguments([CPU, *changes])
    assert given["rewards"] is given["agent"] is mine.f
    assert given["tools"] == [mine.f, mine.g]
    assert given["loss"] is given["advantage"] is mine.g
    assert given["optimizer"] == {"eps": 1e-4}
    assert isinstance(given["engine"]["launcher"], RayLauncher)
    assert train.read_arguments([CPU, "advantage=centered"])["advantage"] == "centered"
    assert train.read_arguments([CPU, "agent=null"])["agent"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give a YAML file, then NAME=VALUE"),
        ([CPU, "lr"], "Give a YAML file, then NAME=VALUE"),
        (["nowhere.yaml"], "nowhere.yaml cannot be read"),
        ([CPU, "group_sise=4"], "no argument 'group_sise'. Did you mean 'group_size'?"),
        ([CPU, "zzz=1"], "GRPO has no argument 'zzz'"),
        ([CPU, "step=nowhere:f"], "step='nowhere:f' names no function: No module"),
        ([CPU, "env=gsm8k:wrong"], "env='gsm8k:wrong' names no function: module"),
        ([CPU, "rewards=right"], "Write MODULE:FUNCTION"),
        ([CPU, "chat_template=nowhere.jinja"], "there is no such file"),
        # The hub is not asked for a file.
        ([CPU, "prompts=nowhere.jsonl"], "there is no file 'nowhere.jsonl'"),
    ],
)
def test_invalid_settings_are_refused(train, arguments, message):
    with pytest.raises(ConfigurationError) as caught:
        train.read_arguments(arguments)
    assert message in str(caught.value)


def test_files_of_prompts(train, tmp_path):
    path, here = tmp_path / "problems.jsonl", tmp_path
    rows = [{"question": "How much?", "answer": "6*7=<<6*7=42>>42\n#### 1,042"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert train.read_prompts("prompts", str(path), here) == rows
    given = {"path": "problems.jsonl", "map": "gsm8k:to_task"}
    expected = [{"query": "How much?", "answer": "1042"}]
    assert train.read_prompts("prompts", given, here) == expected
    # Line ends within texts, as other languages' JSON writes them.
    separators = {"query": "a\u2028b\u2029c\x85d"}
    path.write_text(json.dumps(separators, ensure_ascii=False) + "\r\n\n", "utf-8")
    assert train.read_prompts("prompts", str(path), here) == [separators]
    path.write_text('{"question": "How much?", "answer": "42"}')
    with pytest.raises(ConfigurationError, match="ends with '#### '"):
        train.read_prompts("prompts", given, here)
    path.write_text("{")
    with pytest.raises(ConfigurationError, match="prompts=.* cannot be read"):
        train.read_prompts("prompts", given, here)


def test_a_chat_template_is_a_file_beside_the_yaml_file(train, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "run.yaml").write_text("chat_template: chat.jinja\n")
    given = train.read_arguments([str(tmp_path / "run.yaml")])
    assert given == {"chat_template": "{{ messages }}"}


def test_parquet(train, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"query": str(number)} for number in range(5)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    assert list(train.read_prompts("prompts", "rows.parquet", tmp_path)) == rows
    given = {"path": "rows.parquet", "split": "train[:2]"}
    assert list(train.read_prompts("prompts", given, tmp_path)) == rows[:2]


@pytest.mark.parametrize(
    ("form", "text", "answer", "reward"),
    [
        ("tags", "<think>6*7</think> <answer>42</answer>", "42", 1.0),
        ("tags", "<answer>$1,042.0</answer>", "1042", 1.0),
        ("tags", "<answer>41</answer>", "42", 0.1),
        ("tags", "It is 42.", "42", 0.0),
        ("number", "6*7 is 42.", "42", 1.0),
        ("number", "42, or 43", "42", 0.1),
        ("number", "no idea", "42", 0.0),
        ("number", "-7", "-7", 1.0),
    ],
)
def test_rewards(gsm8k, form, text, answer, reward):
    class Conversation:
        response = text

    right, any_answer = {
        "tags": (gsm8k.right, gsm8k.tagged),
        "number": (gsm8k.right_number, gsm8k.any_number),
    }[form]
    found = [each(Conversation, {"answer": answer}) for each in (right, any_answer)]
    assert 0.9 * found[0] + 0.1 * found[1] == reward


def test_a_script_says_what_is_wrong(tmp_path):
    done = run(CPU, "method=dapos", folder=tmp_path)
    assert done.returncode == 1
    # Some releases of Triton print more when Python exits.
    lines = done.stderr.splitlines()
    (line,) = [each for each in lines if each.startswith("train.py: ")]
    assert "Did you mean 'dapo'?" in line
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_that_goes_on(restored_engine, tiny_model_path, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def few_tokens(conversation, task):\n"
        "    return -float(len(conversation.turns[-1].token_ids))\n"
    )
    changes = [
        f"model={tiny_model_path}",
        f"engine={restored_engine.server_url}",
        "rewards=mine:few_tokens",
        "groups_per_batch=4",
        "output=run",
        "resume=auto",
    ]
    done = run(CPU, *changes, "steps=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 steps. The model is in run/model. \w+.* bounds", done.stdout)
    done = run(CPU, *changes, "steps=3", folder=tmp_path)
    assert "goes on after step 2" in done.stdout
    rows = rows_of(tmp_path / "run")
    assert Counter(row["step"] for row in rows) == dict.fromkeys((1, 2, 3), 32)
    (hyperparameters,) = (tmp_path / "run" / "logs").rglob("texts/hparams*")
    assert "group_size: 8" in hyperparameters.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [[], ["max_staleness=2", "correction=decoupled_token_is"]]
)
def test_from_beginning_to_end(tmp_path, changes):
    """With servers of its own; the rewards go up."""
    done = run(CPU, "output=run", *changes, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "20 steps. The model is in run/model" in done.stdout
    (path,) = (tmp_path / "run" / "logs").rglob("scalars/batch/reward.csv")
    rewards = [float(line.split(",")[1]) for line in path.read_text().splitlines()]
    # Half of it is learnt in the first steps.
    assert fmean(rewards[-10:]) > 1.2 * fmean(rewards[:2])
    assert (tmp_path / "run" / "model" / "config.json").exists()
