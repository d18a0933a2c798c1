"""Plugins that run inside servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.fake_server import FakeServer

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.launch.cpu import launch_command
from torchrl_sglang.backends.launch.plugins import FOLDER, plugin_path
from torchrl_sglang.backends.launch.plugins.torchrl_sglang_ngram import (
    MARK,
    chain_padding,
)
from torchrl_sglang.backends.launch.server_command import make_server_command
from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.types import NGRAM_PLUGIN

PLACES = 8
VOCABULARY = 12


def padded(drafts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and mask as SGLang makes them of one chain for each request."""
    tokens = np.zeros((len(drafts), PLACES), dtype=np.int64)
    mask = np.zeros((len(drafts), PLACES, PLACES), dtype=np.int64)
    for row, draft in enumerate(drafts):
        tokens[row, : len(draft)] = draft
        mask[row, :, 0] = 1
        mask[row] |= np.eye(PLACES, dtype=np.int64)
        size = len(draft)
        mask[row, :size, :size] = np.tri(size, dtype=np.int64)
    return tokens.ravel(), mask.ravel()


def parents(tree: np.ndarray) -> list[int]:
    """Returns the place that each of the further places is below."""
    return [max(np.flatnonzero(row[:i])) for i, row in enumerate(tree) if i]


def siblings(tokens: np.ndarray, tree: np.ndarray) -> Iterator[list[int]]:
    """Yields the tokens below each place."""
    above = parents(tree)
    for place in range(PLACES):
        yield [int(tokens[i + 1]) for i, p in enumerate(above) if p == place]


def sampled(probability: np.ndarray, children: list[int]) -> np.ndarray:
    """Returns the distribution of the next token.

    So does SGLang's kernel ``tree_speculative_sampling_target_only``: one random number
    is compared with the sum of the probabilities of the tokens so far, and what is left
    is drawn from the others.
    """
    found = np.zeros_like(probability)
    total, left = 0.0, probability.copy()
    for token in children:
        accepted = min(probability[token], 1.0 - total)
        found[token] += accepted
        total += accepted
        left[token] = 0.0
    return found + (1.0 - total) * left / max(left.sum(), 1e-12)


@pytest.mark.parametrize("draft", [[3], [3, 4, 5], [3, 0, 0], [0, 0], [0, 3], [3] * 8])
def test_the_next_token_has_its_probability(draft):
    probability = np.random.default_rng(0).dirichlet(np.ones(VOCABULARY))
    tokens, mask = padded([[7, *draft][:PLACES]])
    chained = chain_padding(tokens, mask, 1)
    assert chained.dtype == mask.dtype
    assert chained.shape == mask.shape
    tree = chained.reshape(PLACES, PLACES)
    for children in siblings(tokens, tree):
        np.testing.assert_allclose(sampled(probability, children), probability)
    # The drafts are what they were, but for those of token 0 at their end.
    drafts = 1 + max((i + 1 for i, token in enumerate(draft) if token), default=0)
    drafts = min(drafts, PLACES)
    np.testing.assert_array_equal(tree[:drafts], mask.reshape(PLACES, PLACES)[:drafts])


def test_without_the_plugin_token_0_is_sampled_too_often():
    probability = np.full(VOCABULARY, 1 / VOCABULARY)
    tokens, mask = padded([[7, 3]])
    (first, *_) = siblings(tokens, mask.reshape(PLACES, PLACES))
    assert first == [3, 0, 0, 0, 0, 0, 0]
    assert sampled(probability, first)[0] == pytest.approx(6 / VOCABULARY)


def test_requests_are_apart_from_each_other():
    drafts = [[7, 3, 4], [9], [5, *range(1, PLACES)]]
    tokens, mask = padded(drafts)
    found = chain_padding(tokens, mask, 3).reshape(3, -1)
    for row, draft in enumerate(drafts):
        alone = chain_padding(*padded([draft]), 1)
        np.testing.assert_array_equal(found[row], alone)
    assert chain_padding(tokens[:0], mask[:0], 0).size == 0


def test_servers_with_such_drafts_find_it(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "config.json").write_text("{}")

    def path(**arguments: object) -> str:
        command = make_server_command(
            model=str(tmp_path), device="cuda", python=sys.executable, **arguments
        )
        for lease in command.leases:
            lease.release()
        return command.environment.get("PYTHONPATH", "")

    assert path() == ""
    assert path(speculative_algorithm="NGRAM") == str(FOLDER)
    assert path(speculative_algorithm="ngram") == str(FOLDER)
    assert path(speculative_algorithm="EAGLE") == ""
    own = {"environment": {"PYTHONPATH": "/mine"}}
    assert path(speculative_algorithm="NGRAM", **own) == f"/mine{os.pathsep}{FOLDER}"
    assert plugin_path({}, "/mine") == "/mine"


@pytest.mark.parametrize("marked", [True, False], ids=["plugin", "none"])
def test_sampling_with_biased_drafts_is_refused(tiny_model_path, marked):
    server_args = {
        "speculative_algorithm": "NGRAM",
        "internal_states": [{NGRAM_PLUGIN: True}, {NGRAM_PLUGIN: marked}],
    }
    sampled = {"max_new_tokens": 4}
    with (
        FakeServer(tiny_model_path, server_args=server_args) as server,
        AsyncSGLang.connect(server.url, model=tiny_model_path) as engine,
    ):
        assert engine.capabilities.biased_drafts is not marked
        for harmless in ({"temperature": 0.0}, {"max_new_tokens": 1}):
            engine.generate(input_ids=[5, 6], sampling_params=sampled | harmless)
        if marked:
            engine.generate(input_ids=[5, 6], sampling_params=sampled)
            return
        for temperature in ({}, {"temperature": 0.5}):
            with pytest.raises(UnsupportedByServerError, match="launch/plugins on"):
                engine.generate(input_ids=[5, 6], sampling_params=sampled | temperature)


IN_SGLANG = """
import importlib.util, json, sys

spec = importlib.util.spec_from_file_location("launch", sys.argv[1])
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)
launch.prepare_process()

from sglang.srt.managers import scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

load_plugins()
corpus = NgramCorpus(
    min_bfs_breadth=1,
    max_bfs_breadth=1,
    match_type="BFS",
    capacity=10_000,
    max_trie_depth=18,
    draft_token_num=8,
    external_sam_budget=7,
    external_corpus_max_tokens=1000,
)
loaded = corpus.load_external_corpus_named("text", [[5, 6, 7, 8, 9, 10, 11]])
corpus.commit_external_corpus_load("text", loaded)
ends = [[5, 6, 7], [9, 9, 3]]
tokens, mask = corpus.batch_get(["a", "b"], ends, [3, 3])

class State:
    internal_state = {}

class Scheduler:
    internal_state = State()
    internal_state.get_internal_state = lambda self=None, request=None: State()

told = scheduler.Scheduler.get_internal_state(Scheduler(), None).internal_state
print(json.dumps([tokens.tolist(), mask.tolist(), sorted(told)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_plugin", [True, False], ids=["plugin", "none"])
def test_sglang_s_own_drafts(with_plugin, tmp_path):
    """In the Python of a real server, with its own search for drafts."""
    python, launcher = launch_command()[:2]
    variables = {"HOME": str(tmp_path), "TVM_FFI_CACHE_DIR": str(tmp_path / "ffi")}
    done = subprocess.run(
        [python, "-c", IN_SGLANG, launcher],
        env={
            **os.environ,
            **variables,
            "PYTHONPATH": str(FOLDER) if with_plugin else "",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, mask, told = json.loads(done.stdout.splitlines()[-1])
    assert told == ([MARK] if with_plugin else [])
    rows = np.array(tokens).reshape(2, PLACES)
    assert rows[:, 0].tolist() == [7, 3]
    assert rows[0, 1:5].tolist() == [8, 9, 10, 11]
    for row, tree in zip(rows, np.array(mask).reshape(2, PLACES, PLACES), strict=True):
        unique = all(len(set(each)) == len(each) for each in siblings(row, tree))
        assert unique == with_plugin


def test_the_folder_stands_alone():
    assert MARK == NGRAM_PLUGIN
    (points,) = FOLDER.glob(f"{NGRAM_PLUGIN}-*.dist-info/entry_points.txt")
    assert f"{NGRAM_PLUGIN} = {NGRAM_PLUGIN}:install" in points.read_text()
    assert Path(FOLDER, f"{NGRAM_PLUGIN}.py").is_file()
