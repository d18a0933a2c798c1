"""Examples of the pages on other trainers, with their real packages."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset
from helpers.agent_clients import ENVIRONMENTS
from helpers.scripted_server import Reply, ScriptedServer
from transformers import AutoTokenizer

from torchrl_sglang import (
    GRPO,
    AsyncLLMCollector,
    AsyncSGLang,
    RunRecorder,
    SGLangWrapper,
    load_rollouts,
)
from torchrl_sglang.testing.tiny_model import make_tiny_model

GUIDES = Path(__file__).parents[2] / "docs" / "source" / "guides"
BLOCK = re.compile(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", re.MULTILINE)
COMMON = {"query_key": "prompt", "group_size": 2, "groups_per_batch": 2}

# Of the packages themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Packages of the pins, after those of this environment."""
    missing = ENVIRONMENTS / "libraries.missing"
    if missing.exists():
        pytest.skip(f"libraries are not installed: {missing.read_text()}")
    (folder, *_) = [*ENVIRONMENTS.glob("libraries/lib/*/site-packages"), None]
    if folder is None:
        pytest.skip(".agents/libraries is not there; `make test-agents` makes it.")
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def chat_tokenizer(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def examples_of(page):
    return list(map(textwrap.dedent, BLOCK.findall((GUIDES / page).read_text())))


@pytest.fixture
def run_example(model_folder, chat_tokenizer, tmp_path, monkeypatch):
    """Runs an example of a page: its arguments are checked, and a batch collected."""
    monkeypatch.chdir(tmp_path)

    def run(code, texts):
        script = [Reply(text=text) for text in texts]
        batches = []

        class Collected(GRPO):
            """Collects a batch as the run would, with replies of a script."""

            def __init__(self, model, **arguments):
                with ScriptedServer(model_folder, chat_tokenizer, script) as server:
                    engine = AsyncSGLang.connect(server.url)
                    super().__init__(model, **{**arguments, "engine": engine})
                    batches.append(collect(engine, arguments))
                    engine.shutdown()

            def train(self):
                """Leaves out training, which the replies' model cannot do."""

        namespace = {"GRPO": Collected}
        source = code.replace("from torchrl_sglang import GRPO\n", "")
        exec(compile(source, "example", "exec"), namespace)
        (batch,) = batches
        return batch, namespace["dataset"]

    def collect(engine, arguments):
        shared = {name: arguments[name] for name in (*COMMON, "prompts", "rewards")}
        policy = SGLangWrapper(
            engine,
            tokenizer=chat_tokenizer,
            generate_kwargs=arguments["generate_kwargs"],
            return_log_probs=True,
        )
        with RunRecorder(f"{arguments['output']}/record") as recorder:
            collector = AsyncLLMCollector(
                policy=policy,
                total_groups=2,
                max_in_flight=1,
                recorder=recorder,
                **shared,
            )
            (batch,) = collector
            collector.shutdown()
        return batch

    return run


TEXTS = [
    "<think>\nI add.\n</think>\nIt is \\boxed{4}.",
    "It is \\boxed{4}.",
    "It is \\boxed{8}.",
    "<think>\nI multiply.\n</think>\nIt is \\boxed{9}.",
]


def test_datasets_and_rewards_of_trl(run_example):
    from trl.rewards import accuracy_reward, think_format_reward

    code, _ = examples_of("from_trl.rst")
    batch, dataset = run_example(code, TEXTS)
    said = Counter(row["history"].response.content[0] for row in batch.unbind(0))
    assert said == Counter(TEXTS)
    for row in batch.unbind(0):
        text = row["history"].response.content[0]
        prompt = row["history"].prompt.content[-1]
        (solution,) = {
            r["solution"] for r in dataset if r["prompt"][0]["content"] == prompt
        }
        completions = [[{"role": "assistant", "content": text}]]
        assert row["next", "format"].item() == think_format_reward(completions)[0]
        expected = accuracy_reward(completions, [solution])[0]
        assert row["next", "accuracy"].item() == expected
        assert row["next", "length"].item() == 0.0
        total = 0.2 * row["next", "format"] + row["next", "accuracy"]
        assert row["next", "reward"].item() == pytest.approx(total.item())
    assert batch["next", "accuracy"].sum() == 3


def test_rows_of_a_run_train_with_trl(run_example, chat_tokenizer, monkeypatch):
    from trl.data_utils import is_conversational

    code, training = examples_of("from_trl.rst")
    run_example(code, TEXTS)
    dataset = load_rollouts("runs/a")
    assert all(map(is_conversational, dataset))
    make_tiny_model(chat_tokenizer).save_pretrained("runs/a/model")
    chat_tokenizer.save_pretrained("runs/a/model")
    options = "max_steps=1, use_cpu=True, bf16=False, report_to=[]"
    namespace: dict = {}
    exec(training.replace("max_steps=1", options), namespace)
    trainer = namespace["trainer"]
    assert trainer.state.global_step == 1
    assert len(trainer.train_dataset) == 3


def rows_of_verl(source, truths):
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Question {number}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": number, "split": "train"},
        }
        for number, truth in enumerate(truths)
    ]


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("openai/gsm8k", ["#### 4", "4", "#### 9", "#### 4"]),
        ("math_dapo", ["Answer: 4", "4", "Answer: 9", "Answer: 4"]),
        ("HuggingFaceH4/MATH-500", [r"\boxed{4}", "4", r"\boxed{9}", r"\boxed{4}"]),
    ],
)
def test_files_and_scores_of_verl(run_example, tmp_path, source, texts):
    from verl.utils.reward_score import default_compute_score

    rows = rows_of_verl(source, ["4", "9"])
    Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    (code,) = examples_of("from_verl.rst")
    batch, _ = run_example(code, texts)
    truths = {row["prompt"][0]["content"]: row["reward_model"] for row in rows}
    rewards = []
    for row in batch.unbind(0):
        truth = truths[row["history"].prompt.content[-1]]["ground_truth"]
        text = row["history"].response.content[0]
        value = default_compute_score(source, text, truth)
        expected = value["score"] if isinstance(value, dict) else value
        assert row["next", "reward"].item() == expected
        rewards.append(expected)
    assert len(set(rewards)) == 2
