"""``torchrl-sglang demo``: a run from nothing, with a real server."""

from __future__ import annotations

import pytest

from torchrl_sglang.cli import main
from torchrl_sglang.cli.cpu import install
from torchrl_sglang.cli.demo import ascending


class Said:
    def __init__(self, response):
        self.response = response


@pytest.mark.servers
def test_a_model_is_trained(tmp_path, capsys):
    output = tmp_path / "runs" / "demo"
    words = ["demo", "--steps", "2", "--output", str(output), "--device", "cpu"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "demo.py" in said.out
    assert "step 2/2: reward" in said.out + said.err
    assert "eval" in said.out + said.err
    assert (output / "model" / "model.safetensors").is_file()
    # One of the model that it starts with, and none of the run's own.
    assert said.err.count("Writing model shards:   0%") == 1
    # Another run does not write over it.
    assert main(words) == 2
    assert str(output) in capsys.readouterr().err


def test_the_engine_is_installed_first(monkeypatch, capsys):
    monkeypatch.setattr(install, "main", lambda words: 1)
    assert main(["demo", "--install"]) == 1


@pytest.mark.parametrize("place", ["file", "file/below", "folder/new"])
def test_an_output_that_cannot_be_written(place, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "folder").symlink_to(tmp_path / "gone" / "further")
    path = tmp_path / place
    assert main(["demo", "--output", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"torchrl_sglang demo: {tmp_path}" in said
    assert "Give another path." in said


@pytest.mark.parametrize("words", [["--steps", "0"], ["--device", "tpu"]])
def test_words_that_are_wrong(words, capsys):
    with pytest.raises(SystemExit) as error:
        main(["demo", *words])
    assert error.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_the_reward():
    assert ascending(Said("abcdefghijklmnop"), None) == 1
    assert ascending(Said("ba"), None) == 0
    # A short response is not a way to it.
    assert ascending(Said("ab"), None) == pytest.approx(1 / 15)
    assert ascending(Said(""), None) == 0
