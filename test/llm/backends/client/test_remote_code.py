"""A model that comes with code of its own, read by the client."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest
from helpers.fake_server import FakeServer

from torchrl_sglang import AsyncSGLang, SGLangWrapper
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.event_loop import run_sync

CONFIGURATION = """
from transformers import Qwen2Config
class OwnConfig(Qwen2Config):
    model_type = "own"
"""

MODEL = """
from transformers import Qwen2ForCausalLM
from .configuration_own import OwnConfig
class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
"""

TOKENIZER = """
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""

ANSWER_SECONDS = 30.0


@pytest.fixture
def own_model(tiny_model_path, tmp_path, monkeypatch) -> Path:
    """Folder of the tiny model, which needs its own code to be read."""
    # Where transformers copies such code to.
    cache = str(tmp_path / "cache")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)
    folder = tmp_path / "own"
    shutil.copytree(tiny_model_path, folder)
    for name, code in (
        ("configuration_own.py", CONFIGURATION),
        ("modeling_own.py", MODEL),
        ("tokenization_own.py", TOKENIZER),
    ):
        (folder / name).write_text(code)
    edit(
        folder / "config.json",
        model_type="own",
        auto_map={
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnModel",
        },
    )
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    )
    return folder


def edit(file: Path, **values) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_trusted_code_reads_configuration_tokenizer_and_parameters(
    own_model, tiny_model_path
):
    with (
        FakeServer(own_model) as server,
        AsyncSGLang.connect(server.url, trust_remote_code=True) as engine,
        FakeServer(tiny_model_path) as plain,
        AsyncSGLang.connect(plain.url) as same,
    ):
        assert type(engine.get_tokenizer()).__name__ == "OwnTokenizer"
        assert engine.get_tokenizer().encode("a b") == same.get_tokenizer().encode(
            "a b"
        )
        assert engine.get_model_metadata() == same.get_model_metadata()
        assert engine.get_fused_parameters() == same.get_fused_parameters()
        copy = pickle.loads(pickle.dumps(engine))
        assert type(copy.get_tokenizer()).__name__ == "OwnTokenizer"


def test_code_is_not_run_unless_it_is_trusted_and_the_advice_works(own_model):
    (own_model / "configuration_own.py").write_text("raise SystemExit('it ran')")
    with FakeServer(own_model) as server:
        with pytest.raises(ConfigurationError, match="trust_remote_code=True") as got:
            AsyncSGLang.connect(server.url)
        assert str(own_model) in str(got.value)
        (own_model / "configuration_own.py").write_text(CONFIGURATION)
        AsyncSGLang.connect(server.url, trust_remote_code=True).shutdown()


def test_a_wrapper_trusts_a_tokenizer_as_its_engine_does(own_model, tiny_model_path):
    with (
        FakeServer(tiny_model_path) as server,
        AsyncSGLang.connect(server.url, trust_remote_code=True) as trusting,
        AsyncSGLang.connect(server.url) as engine,
    ):
        policy = SGLangWrapper(trusting, tokenizer=str(own_model))
        assert type(policy.tokenizer).__name__ == "OwnTokenizer"
        with pytest.raises(ConfigurationError, match="trust_remote_code=True") as got:
            SGLangWrapper(engine, tokenizer=str(own_model))
        assert str(own_model) in str(got.value)


@pytest.mark.parametrize("start", ["connect", "from_pretrained"])
def test_the_argument_is_a_bool(start, tiny_model_path):
    with pytest.raises(ConfigurationError, match="must be a bool, got 'yes'"):
        getattr(AsyncSGLang, start)(tiny_model_path, trust_remote_code="yes")


def test_a_model_that_is_read_slowly_holds_up_no_other_request(own_model):
    """Its code waits at a pipe until somebody writes to it."""
    pipe = own_model / "pipe"
    os.mkfifo(pipe)
    (own_model / "configuration_own.py").write_text(
        f"with open({str(pipe)!r}) as file:\n    file.read()\n{CONFIGURATION}"
    )
    engines = []

    def connect(url: str) -> None:
        engines.append(AsyncSGLang.connect(url, trust_remote_code=True))

    async def answer() -> int:
        return 42

    with FakeServer(own_model) as server:
        thread = threading.Thread(target=connect, args=[server.url])
        thread.start()
        # Opened for writing as soon as the code reads.
        with open(pipe, "w"):
            assert run_sync(answer()) == 42
            assert thread.is_alive()
        thread.join(ANSWER_SECONDS)
        engines[0].shutdown()
