"""What a recorder writes, and that no failure of it reaches the run."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import signal
import subprocess
import threading
from itertools import count

import numpy as np
import pytest
import torch
from helpers.forked_starts import trainer_python
from helpers.recorded_runs import make_group
from helpers.waiting import wait_until
from msgspec.structs import replace
from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_sglang import RunRecorder
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.recording.format import pack, unpack
from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.recording.recorder import MOST_TOKENS, scores_of
from torchrl_sglang.recording.records import row_key
from torchrl_sglang.recording.streams import LineStream
from torchrl_sglang.recording.writer import MOST_QUEUED
from torchrl_sglang.trainers.rank_scores import RankScores
from torchrl_sglang.types import Completion

NUMBERS = count(1)


def group_of(size=2, **options):
    number = next(NUMBERS)
    return make_group(random.Random(number), number, size, 1.0, 3, **options)


def with_turn(group, **changes):
    """Returns a group of one response with one turn, which has other values."""
    response = group.responses()[0]
    response = replace(response, turns=[replace(response.turns[0], **changes)])
    return replace(group, responses=lambda: [response])


def record(recorder, **options):
    group = group_of(**options)
    recorder(group)
    return group


def events(folder, kind):
    return [e for e in Recording.open(folder).events if e["kind"] == kind]


def test_a_group_can_be_read_as_it_was(tmp_path):
    with RunRecorder(tmp_path / "run") as recorder:
        group = record(recorder, turns=2)
    recording = Recording.open(tmp_path / "run")
    (line,) = recording.groups
    texts = recording.read_texts(line.texts)
    for given, summary, read in zip(
        group.responses(), line.responses, texts["responses"], strict=True
    ):
        ids = [each for turn in given.turns for each in turn.completion.token_ids]
        assert summary.reward == given.reward
        assert summary.tokens == len(ids)
        known = [x for turn in given.turns for x in turn.completion.log_probs]
        assert summary.log_prob == pytest.approx(sum(known) / len(known))
        written = [unpack(turn["ids"], "i4").tolist() for turn in read["turns"]]
        assert [each for turn in written for each in turn] == ids
        floats = [unpack(turn["log_probs"], "f4") for turn in read["turns"]]
        np.testing.assert_allclose(np.concatenate(floats), known, rtol=1e-6)
        assert [recording.pieces[each] for each in ids] == [f"<{x}>" for x in ids]
        assert [turn["reply"] for turn in read["turns"]] == [
            dict(turn.reply) for turn in given.turns
        ]


@pytest.mark.parametrize("kind", ["i4", "f4"])
@pytest.mark.parametrize(
    "values",
    [[], [1, 2, 3], [-1, 2**31 - 1], [0.5, np.nan, -np.inf], [1e300], [np.int64(7)]],
)
def test_numbers_are_packed_as_numpy_does(kind, values):
    with np.errstate(all="ignore"):
        try:
            wanted = np.array(values, f"<{kind}").tobytes()
        except (ValueError, OverflowError) as error:
            with pytest.raises(type(error)):
                pack(values, kind)
        else:
            assert pack(values, kind) == wanted


def test_a_line_that_is_not_plain_json_has_its_tokens(tmp_path):
    with RunRecorder(tmp_path) as recorder:
        reply = {"role": "assistant", "content": "x", "tool_calls": [{1: 2**70}]}
        group = with_turn(group_of(size=1), reply=reply)
        recorder(group)
    recording = Recording.open(tmp_path)
    (texts,) = recording.read_texts(recording.groups[0].texts)["responses"]
    assert texts["turns"][0]["reply"]["tool_calls"] == [{"1": 2**70}]
    ids = unpack(texts["turns"][0]["ids"], "i4").tolist()
    assert ids == group.responses()[0].turns[0].completion.token_ids


def test_the_text_of_a_token_is_written_once(tmp_path):
    strange = [-1, MOST_TOKENS - 1, MOST_TOKENS, 2**31 - 1]
    with RunRecorder(tmp_path) as recorder:
        for ids in ([3, 1, 3], [1, 2], [2, 3, *strange]):
            done = Completion(token_ids=ids, finish_reason="stop")
            recorder(with_turn(group_of(size=1), completion=done))
    (path,) = tmp_path.glob("vocabulary-*")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"pieces": {"1": "<1>", "3": "<3>"}}, {"pieces": {"2": "<2>"}}]
    assert recorder.lost == 0


def test_settings_versions_and_the_commit_are_written(tmp_path, monkeypatch):
    repository = tmp_path / "code"
    repository.mkdir()
    monkeypatch.chdir(repository)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    (repository / "a.py").write_text("1")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    with RunRecorder(tmp_path / "clean") as recorder:
        recorder.log_hparams({"lr": 1e-6, "reward": len, "lora": {"r": 8}})
    (start,) = events(tmp_path / "clean", "start")
    assert start["settings"]["commit"] == commit
    assert start["settings"]["version.torch"] == torch.__version__
    (settings,) = events(tmp_path / "clean", "settings")
    assert settings["values"]["lr"] == 1e-6
    assert "len" in settings["values"]["reward"]
    (repository / "a.py").write_text("2")
    RunRecorder(tmp_path / "changed").close()
    (start,) = events(tmp_path / "changed", "start")
    assert start["settings"]["commit"] == f"{commit}-dirty"
    monkeypatch.chdir(tmp_path)
    RunRecorder(tmp_path / "none").close()
    (start,) = events(tmp_path / "none", "start")
    assert "commit" not in start["settings"]


def test_records_are_written_soon_without_a_close(tmp_path):
    recorder = RunRecorder(tmp_path)
    recorder.log({"loss": 0.5}, step=1)
    wait_until(lambda: events(tmp_path, "metrics"))
    recorder.close()


def test_texts_can_be_left_out(tmp_path):
    with RunRecorder(tmp_path, prompts=False, responses=False) as recorder:
        record(recorder, turns=2)
    content = "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    assert "What is" not in content
    assert "answer" not in content
    assert "<1>" not in content
    recording = Recording.open(tmp_path)
    turn = recording.read_texts(recording.groups[0].texts)["responses"][0]["turns"]
    assert "ids" not in turn[0]
    assert turn[0]["count"] == len(unpack(turn[0]["log_probs"], "f4"))


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("responses", [True, False])
def test_each_text_is_where_it_was_asked_for_alone(tmp_path, prompts, responses):
    """Also an example in the prompt, and what a policy wrote in an earlier turn."""
    call = {"function": {"name": "add", "arguments": {"of": "SAID-call"}}}
    said = {"role": "assistant", "content": "SAID-now", "tool_calls": [call]}
    earlier = {"role": "assistant", "content": "BOTH", "reasoning_content": "BOTH"}
    told = [{"role": "user", "content": "READ-question", "name": "READ-me"}, earlier]
    with RunRecorder(tmp_path, prompts=prompts, responses=responses) as recorder:
        made = with_turn(group_of(), messages=told, reply=said)
        after = [{"role": "tool", "content": "READ-after"}, earlier]
        response = replace(made.responses()[0], trailing=after)
        group = replace(made.group, name="READ-session")
        recorder(replace(made, group=group, responses=lambda: [response]))
    content = "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    found = {word for word in ("READ", "SAID", "BOTH") if word in content}
    assert found == {
        *(["READ"] if prompts else []),
        *(["SAID"] if responses else []),
        *(["BOTH"] if prompts and responses else []),
    }


@pytest.mark.parametrize(("sample", "count"), [(1.0, 20), (0.25, 5), (0.0, 0)])
def test_of_a_sample_the_numbers_of_all_are_there(tmp_path, sample, count):
    with RunRecorder(tmp_path, sample=sample) as recorder:
        for _ in range(20):
            record(recorder)
    groups = Recording.open(tmp_path).groups
    assert len(groups) == 20
    assert sum(group.texts is not None for group in groups) == count


def test_a_folder_stays_within_its_bound_and_says_so(tmp_path):
    bound = 1_000_000
    with RunRecorder(tmp_path, max_bytes=bound) as recorder:
        for _ in range(400):
            record(recorder, tokens=500)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < bound
    assert size > bound / 3
    dropped = events(tmp_path, "dropped")
    assert dropped
    assert dropped[0]["files"][0].startswith("texts")
    groups = Recording.open(tmp_path).groups
    assert Recording.open(tmp_path).read_texts(groups[0].texts) is None
    assert Recording.open(tmp_path).read_texts(groups[-1].texts) is not None


def test_the_oldest_file_makes_room_whatever_the_clock_says(tmp_path):
    """Files of another writer, which was killed, and whose times are of later."""
    for number in range(3):
        path = tmp_path / f"texts-ffff-{number:05}.jsonl"
        path.write_bytes(b"x" * 100)
        os.utime(path, (4e9 - number, 4e9 - number))
    stream = LineStream(folder=tmp_path, name="texts", writer="0000", most_bytes=800)
    for _ in range(7):
        stream.append(b"y" * 99 + b"\n")
    stream.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"texts-0000-{number:05}.jsonl" for number in range(3, 10)] + [
        "texts-ffff-00002.jsonl"
    ]
    assert stream.removed == [f"texts-ffff-{number:05}.jsonl" for number in (0, 1)]


def test_a_recording_is_for_its_owner_alone(tmp_path):
    folder = tmp_path / "record"
    with RunRecorder(folder) as recorder:
        record(recorder)
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_texts_of_tokens_outlast_files_that_make_room(tmp_path):
    """Common tokens are written first, and their file is the first that goes."""
    with RunRecorder(tmp_path, max_bytes=1_000_000) as recorder:
        for number in range(400):
            made = group_of()
            first = made.responses()[0].turns[0]
            ids = [1, 2, *range(100 + 50 * number, 150 + 50 * number)]
            done = dataclasses.replace(
                first.completion, token_ids=ids, log_probs=[-1.0] * len(ids)
            )
            recorder(with_turn(made, completion=done))
    dropped = [name for event in events(tmp_path, "dropped") for name in event["files"]]
    assert any(name.startswith("vocabulary") for name in dropped)
    pieces = Recording.open(tmp_path).pieces
    assert 100 not in pieces
    assert all(pieces.get(token) == f"<{token}>" for token in ids)


def test_a_file_that_another_process_removed_is_begun_again(tmp_path):
    stream = LineStream(folder=tmp_path, name="events", writer="one", most_bytes=8000)
    stream.append(b"1\n")
    stream.flush()
    (tmp_path / "events-one-00000.jsonl").unlink()
    stream.append(b"2\n")
    stream.flush()
    stream.append(b"3\n")
    stream.close()
    assert (tmp_path / "events-one-00001.jsonl").read_bytes() == b"3\n"


class Awkward:
    """Has no form, not even as a text."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def test_records_that_cannot_be_written_cost_one_warning(tmp_path, torchrl_warnings):
    recorder = RunRecorder(tmp_path)

    def fails():
        raise RuntimeError("a mistake")

    for _ in range(3):
        recorder(replace(group_of(), responses=fails))
        recorder.event("odd", value=Awkward())
        recorder.log({"odd": torch.ones(2)}, step=1)
    recorder.log({"odd": Awkward(), "loss": torch.tensor(0.5)}, step=np.int64(1))
    recorder.log({"loss": 1.0}, step="first")
    recorder.log(None)
    recorder.close()
    assert recorder.lost == 12
    told = [text for text in torchrl_warnings if "not complete" in text]
    assert len(told) == 2
    assert "metric 'odd' cannot be recorded" in told[0] + told[1]
    assert "a mistake" in told[0] + told[1]
    (metrics,) = events(tmp_path, "metrics")
    assert (metrics["step"], metrics["values"]) == (1, {"loss": 0.5})
    assert events(tmp_path, "lost")[-1]["records"] == 12


def test_records_after_the_end_cost_a_warning(tmp_path, torchrl_warnings):
    with RunRecorder(tmp_path) as recorder:
        pass
    recorder.close()
    recorder.log({"loss": 1.0}, step=1)
    recorder.log({"loss": 1.0}, step=2)
    assert recorder.lost == 2
    (told,) = torchrl_warnings
    assert "it was closed before the run had ended" in told


def test_a_pickled_recorder_writes_files_of_its_own_in_the_folder(
    tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunRecorder("run") as recorder:
        monkeypatch.chdir(tmp_path / "elsewhere")
        recorder.log({"a": 1.0})
        with pickle.loads(pickle.dumps(recorder)) as copied:
            copied.log({"b": 1.0})
    assert len(list((tmp_path / "run").glob("events-*.jsonl"))) == 2
    metrics = [event["values"] for event in events(tmp_path / "run", "metrics")]
    assert sorted(metrics, key=str) == [{"a": 1.0}, {"b": 1.0}]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_full_disk_costs_one_warning(tmp_path, torchrl_warnings):
    # A file larger than this fails as a full disk does: a real limit of the system.
    program = f"""
import resource, signal
from torchrl_sglang import RunRecorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
recorder = RunRecorder({str(tmp_path)!r})
for step in range(2000):
    recorder.log({{"loss": 0.5}}, step=step)
recorder.close()
print("lost", recorder.lost)
"""
    done = subprocess.run(
        [trainer_python(), "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("is not complete") == 1
    # What is there can be read, and what is not is counted: with the start, 2001.
    read = len(Recording.open(tmp_path).events)
    assert 0 < read < 2001
    assert f"lost {2001 - read}\n" in done.stdout


def test_a_queue_that_is_full_loses_and_does_not_wait(tmp_path, torchrl_warnings):
    recorder = RunRecorder(tmp_path)
    began, go_on = threading.Event(), threading.Event()
    group = group_of()

    def waits():
        began.set()
        assert go_on.wait(60)
        return group.responses()

    waiting = replace(group, responses=waits)
    recorder(waiting)
    assert began.wait(60)
    recorder(replace(waiting, tokens=MOST_QUEUED - 1))
    recorder(waiting)
    assert recorder.lost == 1
    go_on.set()
    recorder.close()
    assert len(Recording.open(tmp_path).groups) == 2


def test_a_run_that_is_killed_leaves_what_can_be_read(tmp_path):
    program = f"""
from torchrl_sglang import RunRecorder
recorder = RunRecorder({str(tmp_path)!r})
step = 0
while True:
    step += 1
    recorder.log({{"loss": 1.0}}, step=step)
    if step % 1000 == 0:
        print(step, flush=True)
"""
    with subprocess.Popen(
        [trainer_python(), "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        # In the middle of a write, as likely as not.
        while process.stdout.readline():
            if sum(path.stat().st_size for path in tmp_path.glob("events-*")) > 1e6:
                break
        os.kill(process.pid, signal.SIGKILL)
    recording = Recording.open(tmp_path)
    steps = [each["step"] for each in recording.events if each["kind"] == "metrics"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 100
    assert not recording.damage.count


def test_dropping_a_recorder_writes_what_is_queued(tmp_path):
    recorder = RunRecorder(tmp_path)
    recorder.log({"loss": 0.5}, step=1)
    del recorder
    assert events(tmp_path, "metrics")
    names = {thread.name for thread in threading.enumerate()}
    assert "torchrl_sglang-recorder" not in names


def test_a_forked_process_writes_nothing(tmp_path):
    with RunRecorder(tmp_path) as recorder:
        recorder.log({"here": 1.0})
        pid = os.fork()
        if pid == 0:
            recorder.log({"there": 1.0})
            recorder.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    assert [each["values"] for each in events(tmp_path, "metrics")] == [{"here": 1.0}]


def test_a_phase_lasts_as_long_as_its_block(tmp_path):
    with RunRecorder(tmp_path) as recorder:
        with pytest.raises(KeyError), recorder.phase("train"):
            raise KeyError
    (phase,) = events(tmp_path, "phase")
    assert phase["name"] == "train"
    assert phase["span"][0] <= phase["span"][1] <= phase["time"]


def scored_rows():
    """Rows of a batch, whose engine has a log-prob of -1 and of -2."""
    rows = [
        TensorDict(
            tokens=TensorDict(
                full=torch.tensor([7, number, 9]), response=torch.tensor([number, 9])
            ),
            log_probs=TensorDict(full=torch.tensor([torch.nan, -1.0, -2.0])),
            advantage=torch.full((1, 1), float(number)),
        )
        for number in range(3)
    ]
    return LazyStackedTensorDict(*rows, stack_dim=0)


def test_trained_rows_are_found_by_their_tokens(tmp_path):
    batch = scored_rows()
    scored = torch.tensor([[torch.nan, -1.5, -2.0]]).expand(3, 3)
    with RunRecorder(tmp_path) as recorder:
        recorder.trained(batch, step=4)
        recorder.scored([(batch, scored)])
    (trained,), (told,) = events(tmp_path, "trained"), events(tmp_path, "scored")
    keys = [row_key([7, number, 9]) for number in range(3)]
    assert [(row["key"], row["advantage"]) for row in trained["rows"]] == [
        (key, float(number)) for number, key in enumerate(keys)
    ]
    # The means and the largest of the differences 0.5 and 0.
    assert [(row["kl"], row["gap"]) for row in told["rows"]] == [(0.25, 0.5)] * 3
    line = Recording.open(tmp_path).read_texts(told["scores"])
    assert unpack(line["scores"][keys[0]], "f4").tolist() == [-1.5, -2.0]


def test_a_response_without_tokens_has_no_scores():
    row = TensorDict(
        tokens=TensorDict(full=torch.arange(3), response=torch.arange(0)),
        log_probs=TensorDict(full=torch.tensor([torch.nan, -1.0, -2.0])),
    )
    # Another row of the pass is longer.
    known = torch.full((1, 4), -1.5)
    found = scores_of([(LazyStackedTensorDict(row, stack_dim=0), known)])
    (told,) = found.rows
    assert told == {"key": row_key([0, 1, 2])}
    assert not len(unpack(found.log_probs[told["key"]], "f4"))


class TwoRanks:
    """The first of two ranks, whose other one sends what it is made with."""

    def __init__(self, other):
        self.other = other

    def gather_first(self, value):
        assert value is None
        return [value, pickle.loads(pickle.dumps(self.other))]


class OtherRank:
    """The second of two ranks, which keeps what it sends."""

    def gather_first(self, value):
        self.sent = value
        return []


def test_the_first_rank_records_what_all_have_scored(tmp_path, torchrl_warnings):
    rows = scored_rows()
    scored = torch.tensor([[torch.nan, -1.5, -2.0]]).expand(3, 3)
    other = OtherRank()
    RankScores(recorder=None, ranks=other).scored([(rows[1:], scored[1:])])
    with RunRecorder(tmp_path) as recorder:
        first = RankScores(recorder=recorder, ranks=TwoRanks(other.sent))
        first.scored([(rows[:1], scored[:1])])
    told = events(tmp_path, "scored")
    keys = [row_key([7, number, 9]) for number in range(3)]
    assert [row["key"] for event in told for row in event["rows"]] == keys
    texts = Recording.open(tmp_path).read_texts(told[1]["scores"])
    assert unpack(texts["scores"][keys[2]], "f4").tolist() == [-1.5, -2.0]
    # What a rank cannot read costs its scores and a warning, and nothing waits.
    RankScores(recorder=None, ranks=other).scored([(rows, scored[:1])])
    with RunRecorder(tmp_path) as recorder:
        first = RankScores(recorder=recorder, ranks=TwoRanks(other.sent))
        first.scored([(rows[:1], scored[:1])])
    assert recorder.lost == 1
    (warning,) = torchrl_warnings
    assert "another rank are not known, ValueError" in warning


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample": 2}, "share from 0 to 1, got 2"),
        ({"sample": True}, "share from 0 to 1, got True"),
        ({"max_bytes": 10}, "at least 1000000, got 10"),
        ({"poll_seconds": 0}, "poll_seconds must be a positive"),
        ({"prompts": "yes"}, "prompts must be a bool, got 'yes'"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        RunRecorder(tmp_path, **arguments)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot hold a recording"):
        RunRecorder(tmp_path / "file")


def test_a_folder_of_another_format_is_refused(tmp_path):
    (tmp_path / "recording.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(ConfigurationError, match="has format 0"):
        RunRecorder(tmp_path)
