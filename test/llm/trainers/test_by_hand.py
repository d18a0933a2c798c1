"""The listing of "By hand" trains what ``GRPO`` trains."""

from __future__ import annotations

import re
import textwrap
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers.fake_server import FakeServer
from torchrl.modules.llm import TransformersWrapper

import torchrl_sglang
from torchrl_sglang import GRPO, AsyncSGLang, SGLangWeightSyncScheme

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = Path(__file__).parents[3] / "docs/source/guides/write_your_run.rst"
ROWS = [{"query": f"Say {number}."} for number in range(12)]

SMALLER = {
    '"cuda:0"': '"cpu"',
    ", autocast=True)": ")",
    '"max_new_tokens": 512': '"max_new_tokens": 6',
    "lr=1e-6": "lr=1e-3",
    "group_size=8": "group_size=4",
    "groups_per_batch=16": "groups_per_batch=4",
    "total_groups=16 * 100": "total_groups=4 * 3",
    "rewards=right": "rewards=right, step=go_on",
}
"""Text of the listing -> its text for this machine."""


class Sampler(FakeServer):
    """Responses that depend on prompt, sample and weight version alone."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._deterministic, self._samples = True, Counter()

    def reply(self, item):
        prompt = f"{item['input_ids']} {self.weight_version}"
        sample = f"{prompt} {self._samples[prompt]}"
        self._samples[prompt] += 1
        seed = zlib.crc32(sample.encode())
        params = item["sampling_params"] | {"sampling_seed": seed}
        return super().reply(item | {"sampling_params": params})


def right(conversation, task):
    ids = [token for turn in conversation.turns for token in turn.token_ids]
    return sum(token % 7 for token in ids) / len(ids)


def go_on(conversation, task):
    return "Go on." if len(conversation.turns) < 2 else None


def train_by_hand(engine, path, folder):
    """Returns the model that the listing of the page trains, and its policy."""
    section = PAGE.read_text().partition("By hand\n-------")[2]
    code = textwrap.dedent(re.search(r"python\n\n((?:   .*\n|\n)+)", section)[1])
    for text, smaller in SMALLER.items():
        assert code.count(text) >= 1, text
        code = code.replace(text, smaller)
    names = {name: getattr(torchrl_sglang, name) for name in torchrl_sglang.__all__}
    names |= {
        "torch": torch,
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "TransformersWrapper": TransformersWrapper,
        "AsyncSGLang": SimpleNamespace(from_pretrained=lambda path: engine),
        "SGLangWeightSyncScheme": partial(SGLangWeightSyncScheme, directory=folder),
        "path": path,
        "rows": ROWS,
        "right": right,
        "go_on": go_on,
    }
    exec(compile(code, str(PAGE), "exec"), names)
    return names["model"], names["policy"]


def train(engine, path, folder):
    """Returns the model that ``GRPO`` trains, and its policy."""
    run = GRPO(
        path,
        prompts=ROWS,
        rewards=right,
        step=go_on,
        group_size=4,
        groups_per_batch=4,
        generate_kwargs={"max_new_tokens": 6},
        lr=1e-3,
        engine=engine,
        weight_sync={"directory": folder},
        output=folder / "run",
    )
    run.train()
    return run.model, run.policy


@pytest.mark.parametrize("used", [pytest.param(False, marks=pytest.mark.slow), True])
def test_by_hand_trains_the_same_weights(tiny_model_path, tmp_path, used):
    """Also with servers that have the weights of an earlier run."""
    before = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_path)
    trained = []
    for number, way in enumerate((train_by_hand, train)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with (
            Sampler(tiny_model_path) as server,
            torch.random.fork_rng(devices=[]),
            AsyncSGLang.connect(server.url) as engine,
        ):
            if used:
                scheme = SGLangWeightSyncScheme(engine, before, directory=folder)
                scheme.create_sender().update_weights()
                scheme.shutdown()
            model, policy = way(engine, tiny_model_path, folder)
            trained.append(model.state_dict())
            # A token of the tiny model is a letter: its text has the same tokens.
            assert policy.prefer_tokens
    mine, its = trained
    for name, value in its.items():
        # A step is 1e-3; log-probs differ by which requests a server batched.
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-5)
    changed = max(
        float((its[name] - value).abs().max())
        for name, value in before.state_dict().items()
    )
    assert changed > 1e-3
