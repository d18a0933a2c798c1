"""``view``: folders and files that a user may give it."""

from __future__ import annotations

import os
import shutil

import pytest
from helpers.recorded_runs import write_run

from torchrl_sglang.cli import main


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "run" / "record", steps=2)
    return tmp_path / "run"


def test_a_file_of_a_folder_whose_name_is_no_text(folder, tmp_path, capsys):
    odd = os.path.join(os.fsencode(tmp_path), b"run \xff")
    shutil.copytree(os.fsencode(folder), odd)
    file = tmp_path / "run.html"
    given = os.fsdecode(odd)
    assert main(["view", given, str(folder), "--output", str(file)]) == 0
    assert f"{file} (" in capsys.readouterr().out
    assert "run \ufffd and run" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "RUN/record"], "was given twice"),
        (["RUN", "RUN", "RUN"], "3 folders were given"),
        (["RUN/none"], "does not exist"),
        (["RUN", "--output", "RUN/none/run.html"], "cannot be written"),
        (["RUN", "--port", "99999"], "--port 99999 is not a port"),
    ],
)
def test_recordings_that_cannot_be_shown_are_reported(
    folder, capsys, arguments, message
):
    given = [each.replace("RUN", str(folder)) for each in arguments]
    assert main(["view", *given]) != 0
    assert message in capsys.readouterr().err
