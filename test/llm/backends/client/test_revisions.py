"""A model of a hub is read in the revision that its server serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_sglang.testing.tiny_model import save_tiny_model

NAME = "someone/model"
PROGRAM = """
import dataclasses, json, sys
from torchrl_sglang.backends.client.model_info import read_model
from torchrl_sglang.backends.client.model_info import ServedModel
from torchrl_sglang.types import ServerCapabilities

name, found = sys.argv[1], {}
needed = {
    field.name: None
    for field in dataclasses.fields(ServerCapabilities)
    if field.default is field.default_factory is dataclasses.MISSING
}
for revision in (None, "older"):
    vocab_size = read_model(None, name, name, False, revision).vocab_size
    served = ServedModel(
        ServerCapabilities(
            **{**needed, "model_path": name, "tokenizer_path": name},
            server_args={"revision": revision},
        ),
        None,
    )
    embedding = served.get_metadata()["model.embed_tokens.weight"]
    tokens = len(served.get_tokenizer())
    found[str(revision)] = [vocab_size, embedding[1][1], tokens]
print(json.dumps(found))
"""


def save_revision(cache: Path, revision: str, commit: str, width: int, word: str):
    """Writes a model into a cache of the hub's layout."""
    folder = cache / f"models--{NAME.replace('/', '--')}"
    save_tiny_model(folder / "snapshots" / commit, hidden_size=width)
    tokens = folder / "snapshots" / commit / "tokenizer.json"
    content = json.loads(tokens.read_text())
    vocab = content["model"]["vocab"]
    if word:
        vocab[word] = len(vocab)
    tokens.write_text(json.dumps(content))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(commit)


@pytest.mark.slow
def test_the_servers_revision_is_read(tmp_path):
    save_revision(tmp_path, "main", "a" * 40, 64, "")
    save_revision(tmp_path, "older", "b" * 40, 128, "newword")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, NAME],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["None"][1:] == [64, found["older"][2] - 1]
    assert found["older"][1] == 128
