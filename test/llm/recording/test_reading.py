"""Recordings that are cut off, damaged, too large, or none."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from helpers.recorded_runs import BEGAN, BOUNDS, Recorded, make_group, write_run
from msgspec.structs import replace

from torchrl_sglang import RunRecorder
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.recording.reading import (
    BLOCK,
    MOST_OF_LINE,
    MOST_OF_TEXTS,
    MOST_TOLD,
    Recording,
)
from torchrl_sglang.recording.records import summary_of
from torchrl_sglang.viewer.page import as_script, page_data, read_runs
from torchrl_sglang.viewer.timeline import in_flight


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "run", steps=3)
    return tmp_path / "run"


def only(folder, stream):
    (path,) = folder.glob(f"{stream}-*.jsonl")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("x"), "is a file"),
        (lambda path: path.mkdir(), "not the folder of a recording"),
    ],
)
def test_a_folder_that_is_none_is_refused(tmp_path, make, message):
    make(tmp_path / "given")
    with pytest.raises(ConfigurationError, match=message):
        Recording.open(tmp_path / "given")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 0, "torchrl_sglang": "0.0.1"}', "format 0, written by .* 0.0.1"),
        ('{"format": 99}', "format 99"),
        ('{"for', "cannot be read"),
        ("[]", "cannot be read"),
    ],
)
def test_another_format_says_so(folder, content, message):
    (folder / "recording.json").write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        Recording.open(folder)


def test_the_recording_of_a_run_is_found_in_its_folder(tmp_path):
    write_run(tmp_path / "record", steps=1)
    assert Recording.open(tmp_path).folder == tmp_path / "record"


@pytest.mark.parametrize("stream", ["events", "groups"])
def test_a_file_that_is_cut_anywhere_can_be_read(folder, stream):
    path = only(folder, stream)
    whole = path.read_bytes()
    lines = whole.count(b"\n")
    for cut in range(0, len(whole), max(len(whole) // 40, 1)):
        path.write_bytes(whole[:cut])
        recording = Recording.open(folder)
        assert not recording.damage.count
        found = recording.events if stream == "events" else recording.groups
        assert len(found) == whole[:cut].count(b"\n") <= lines
        torn = cut > 0 and whole[cut - 1 : cut] != b"\n"
        assert recording.unfinished == ([path.name] if torn else [])
        (run,) = read_runs([recording])
        assert any("cut off" in note for note in run.notes) == torn


def test_a_line_that_is_written_later_is_read_then(folder):
    path = only(folder, "events")
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    recording = Recording.open(folder)
    before = len(recording.events)
    with path.open("ab") as file:
        file.write(whole[-10:])
    assert recording.refresh()
    assert len(recording.events) == before + 1
    assert not recording.refresh()


def test_damage_within_a_file_costs_its_lines_only(folder):
    path = only(folder, "groups")
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"\0" * len(first) + b"\n" + b"[1]\n" + b'{"id": 1}\n' + b"".join(rest)
    )
    recording = Recording.open(folder)
    (run,) = read_runs([recording])
    assert len(run.groups) == len(rest)
    notes = " ".join(run.notes)
    assert "2 lines could not be read" in notes
    assert "1 lines are not as they should be" in notes


def test_texts_of_another_place_are_none(folder):
    recording = Recording.open(folder)
    name, offset, length = recording.groups[0].texts
    for place in (
        ["../" + name, offset, length],
        ["/etc/passwd", 0, 10],
        [name, offset + 1, length],
        [name, offset, MOST_OF_TEXTS + 1],
        None,
        ["x"],
    ):
        assert recording.read_texts(place) is None


def test_of_ten_gigabytes_the_newest_are_read(folder):
    # A sparse file: a line that never ends, and then the run's own.
    path = only(folder, "events")
    whole = path.read_bytes()
    with path.open("wb") as file:
        file.truncate(10_000_000_000)
        file.seek(0, 2)
        file.write(b"\n" + whole)
    began = time.monotonic()
    recording = Recording.open(folder)
    assert time.monotonic() - began < 60
    assert len(recording.events) == whole.count(b"\n")
    assert any("are not shown" in sentence for sentence in recording.left_out)


@pytest.mark.slow
def test_a_huge_log_with_a_hole_takes_bounded_memory(tmp_path):
    """The newest lines are read, of 10 GB that another process reads."""
    run = Recorded(tmp_path, texts=False)
    run.step(tokens=4)
    run.close()
    path = only(tmp_path, "groups")
    line = path.read_bytes().splitlines(keepends=True)[0]
    many = line * (BLOCK // len(line))
    with path.open("wb") as file:
        file.truncate(10_000_000_000)
        file.seek(0, 2)
        # Cut off in a line, a hole of zeros, garbage, and the run goes on.
        for _ in range(10):
            file.write(many + line[:40])
            file.seek(MOST_OF_LINE // 2, 1)
            file.write(b"x\n" * 1000 + many)
    program = (
        "import resource, sys\n"
        "from torchrl_sglang.recording.reading import Recording\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "read = Recording.open(sys.argv[1])\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(len(read.groups), read.damage.count, len(read.damage.first))\n"
        "print((after - before) / 1e6, len(read.left_out))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    groups, damaged, told, gigabytes, left_out = map(float, done.stdout.split())
    # The first one ends the line that reading begins in.
    assert groups == 20 * (BLOCK // len(line)) - 1
    # Each part has a line that is cut off and goes on with zeros.
    assert damaged == 10 * 1000
    assert told <= MOST_TOLD
    assert gigabytes < 1.0
    assert left_out == 1


def test_lines_of_another_kind_are_counted(folder):
    with only(folder, "vocabulary").open("ab") as file:
        file.write(b'{"pieces": {"x": "y"}}\n{"pieces": 1}\n')
    with only(folder, "groups").open("ab") as file:
        file.write(b'{"id": 1, "time": [1, 2], "status": "x", "responses": 3}\n')
        file.write(b"[" * 100_000 + b"\n")
        # What Python writes for numbers that are not finite.
        response = '{"reward": NaN, "tokens": 7, "keys": []}'
        line = f'{{"id": 99, "time": [1, 2], "status": "x", "responses": [{response}]}}'
        file.write(line.encode() + b"\n")
    recording = Recording.open(folder)
    assert (recording.malformed, recording.damage.count) == (3, 1)
    (run,) = read_runs([recording])
    (group,) = [group for group in run.groups if group.id == "99"]
    assert (group.line.tokens, group.line.rewards) == (7, [])


def test_a_group_has_the_totals_of_its_responses(tmp_path):
    given = [
        {"tokens": 3, "keys": ["a", "b"], "reward": 0.5, "rewards": {"x": 1.0}},
        {"tokens": 4, "keys": ["c"], "rewards": {"x": None, "y": 2.0}, "turns": 3},
        {"tokens": 5, "keys": [], "reward": -1, "cut": True, "versions": [2, 3]},
        {"tokens": 6, "keys": ["d"], "rewards": {"x": 0.25}, "versions": [1, 9]},
        {"tokens": 7, "keys": ["e"], "versions": [], "tools": 2},
    ]
    run = Recorded(tmp_path)
    line = {"id": 1, "time": [1.0, 2.0], "status": "complete", "responses": given}
    run.files.append("groups", line)
    run.close()
    (group,) = Recording.open(tmp_path).groups
    assert [each.tokens for each in group.responses] == [3, 4, 5, 6, 7]
    assert (group.count, group.tokens, group.keys) == (5, 25, list("abcde"))
    assert (group.rewards, group.best, group.worst) == ([0.5, -1.0], 0.5, -1.0)
    assert group.named == {"x": (1.25, 2), "y": (2.0, 1)}
    assert (group.turns, group.tools, group.cut, group.oldest) == (3, 2, 1, 1)


def test_a_recorder_that_goes_on_adds_to_the_folder(folder):
    before = len(Recording.open(folder).events)
    with RunRecorder(folder) as recorder:
        recorder.log({"loss": 0.25}, step=4)
    recording = Recording.open(folder)
    assert len(recording.events) == before + 2


def test_a_step_that_is_done_again_counts_once(tmp_path):
    run = Recorded(tmp_path)
    for step in (1, 2, 3):
        run.event("metrics", step=step, values={"loss": float(step)})
    run.time += 1
    # It was killed, and goes on with the checkpoint of step 1.
    run.event("step", step=1)
    run.event("metrics", step=2, values={"loss": 20.0})
    run.close()
    (read,) = read_runs([Recording.open(tmp_path)])
    assert read.metrics["loss"] == {1: 1.0, 2: 20.0}


def test_a_run_that_goes_on_has_the_groups_of_both_parts(tmp_path):
    """Each recorder numbers its groups and batches from 1."""
    parts = []
    for part in range(2):
        run = Recorded(tmp_path, seed=part, writer=f"{part}a")
        run.time += 1000 * part
        for _ in range(3):
            run.step()
        run.event("began", id=run.number + 1, position=0)
        run.event("stale", id=1)
        run.event("step", step=2)
        run.close()
        parts += [run.written[n : n + 4] for n in range(0, 12, 4)]
    (run,) = read_runs([Recording.open(tmp_path)])
    assert len({group.id for group in run.groups}) == 24
    assert [group.id for group in run.groups if group.status == "stale"] == ["1", "1.2"]
    for number, written in enumerate(parts, 1):
        own = [group for group in run.groups if group.batch == number]
        assert sorted(sum(group.line.rewards) for group in own) == sorted(
            sum(response.reward for response in group.responses) for group in written
        )
    # One that was killed leaves no group in flight behind.
    assert in_flight(run)[-1][1] == 1
    assert run.resumed == BEGAN + 1000
    assert any("went on after step 2" in note for note in run.notes)


def test_a_clock_that_is_set_back_changes_no_order(tmp_path):
    run = Recorded(tmp_path)
    for hour in (0, -1, 2):
        run.time += 3600 * hour
        run.step()
    run.close()
    (read,) = read_runs([Recording.open(tmp_path)])
    assert [group.status for group in read.groups] == ["trained"] * 12
    found = {group.id: group.batch for group in read.groups}
    assert found == {
        str(group.id): place // 4 + 1 for place, group in enumerate(run.written)
    }
    assert len(json.loads(as_script(page_data([read], now=0.0)))["curves"]) > 5


def test_groups_with_the_same_tokens_differ_by_their_batch(tmp_path):
    run = Recorded(tmp_path, groups=1, size=1)
    group = make_group(run.rng, 1, 1, BEGAN, 0)
    for number, began in enumerate((BEGAN, BEGAN + 1, BEGAN + 2), 1):
        start = replace(group.group, id=number, start=began)
        same = replace(group, group=start, end=began + 0.5)
        summary = summary_of(same, same.responses(), BOUNDS)
        run.files.append("groups", summary)
    row = {"key": summary["responses"][0]["keys"][0], "advantage": 1.0}
    run.event("batch", BEGAN + 2, number=1, version=0, ids=[1, 2])
    run.event("trained", BEGAN + 3, step=1, rows=[row])
    run.close()
    (read,) = read_runs([Recording.open(tmp_path)])
    found = {group.id: group.status for group in read.groups}
    assert found == {"1": "trained", "2": "trained", "3": "complete"}


def test_a_manifest_says_what_it_is(folder):
    assert json.loads((folder / "recording.json").read_text())["format"] == 1
