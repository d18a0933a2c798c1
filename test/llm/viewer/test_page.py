"""What a page shows equals what a run has recorded."""

from __future__ import annotations

import json
import random
import re
import statistics
from itertools import pairwise

import pytest
from helpers.recorded_runs import BEGAN, Recorded, write_run

from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.viewer.groups import (
    FILTERS,
    MOST_ROWS,
    conversations_of,
    search,
)
from torchrl_sglang.viewer.page import (
    as_script,
    page_data,
    page_html,
    read_runs,
    self_contained,
)
from torchrl_sglang.viewer.run import Bar, RunData
from torchrl_sglang.viewer.timeline import in_flight, lanes, override, thin

STEPS = 12

DAMAGE = [
    b"\n",
    b'"',
    b"{",
    b"9",
    b"-",
    b"null",
    b"\0",
    b"\xff",
    b"\\ud800",
    b"[]",
    b"1e999",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("recorded") / "run", steps=STEPS)


@pytest.fixture(scope="module")
def data(written):
    return page_data(read_runs([Recording.open(written.folder)]), now=BEGAN + 1e6)


def curve(data, name):
    return next(each for each in data["curves"] if each["id"] == name)


def points(data, name, line):
    values = curve(data, name)["spec"]["data"]["values"]
    return {point["x"]: point["y"] for point in values if point["line"] == line}


def of_batches(written, value):
    """The mean over the responses of each batch, computed from what was written."""
    size = written.per_batch
    groups = written.written
    return {
        float(place + 1): statistics.fmean(
            value(each)
            for group in groups[place * size : (place + 1) * size]
            for each in group.responses
        )
        for place in range(len(groups) // size)
    }


def tokens(response):
    return sum(len(turn.completion.token_ids) for turn in response.turns)


def test_curves_are_the_means_of_batches(data, written):
    expected = of_batches(written, lambda each: each.reward)
    assert points(data, "reward", "reward") == pytest.approx(expected)
    expected = of_batches(written, lambda each: each.rewards["short"])
    assert points(data, "reward", "short") == pytest.approx(expected)
    assert points(data, "length", "tokens") == pytest.approx(
        of_batches(written, tokens)
    )


def test_facts_count_what_was_written(data, written):
    facts = dict(data["runs"][0]["facts"])
    groups = written.written
    assert facts["groups"] == str(len(groups))
    assert facts["responses"] == str(sum(len(group.responses) for group in groups))
    count = sum(tokens(each) for group in groups for each in group.responses)
    assert facts["response tokens"] == f"{count:,}"
    assert facts["weight updates"] == str(STEPS)


def test_rows_are_groups_the_newest_first(data, written):
    table = data["runs"][0]["groups"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    by_id = {str(group.id): group for group in written.written}
    assert len(rows) == len(by_id)
    for row in rows:
        group = by_id[row["id"]]
        rewards = [each.reward for each in group.responses]
        assert row["reward"] == pytest.approx(statistics.fmean(rewards), rel=1e-3)
        assert row["tokens"] == sum(map(tokens, group.responses))
        assert row["age"] == 0
        assert row["gap"] == pytest.approx(0.01 * group.id, rel=1e-3)
        assert row["advantage"] == 0.5
        assert ("wrong" in row["tags"]) == (set(rewards) == {0.0})
        assert ("right" in row["tags"]) == (set(rewards) == {1.0})
        assert ("mixed" in row["tags"]) == (len(set(rewards)) == 2)
        cut = [
            any(turn.completion.finish_reason == "length" for turn in each.turns)
            for each in group.responses
        ]
        assert row["truncated"] == sum(cut)
        assert ("truncated" in row["tags"]) == any(cut)
        assert ("tools" in row["tags"]) == (len(group.responses[0].turns) > 1)
    assert len([r for r in rows if "mismatch" in r["tags"]]) == -(-len(rows) // 10)
    assert {tag for row in rows for tag in row["tags"]} <= set(FILTERS)


def test_strips_are_the_tokens(written):
    recording = Recording.open(written.folder)
    (run,) = read_runs([recording])
    for group, given in zip(
        sorted(run.groups, key=lambda each: int(each.id)), written.written, strict=True
    ):
        found = conversations_of(recording, group)
        for response, known in zip(found["responses"], given.responses, strict=True):
            for turn, told in zip(response["turns"], known.turns, strict=True):
                assert turn["ids"] == told.completion.token_ids
                assert turn["log_probs"] == pytest.approx(
                    told.completion.log_probs, rel=1e-3
                )
                assert "".join(turn["pieces"]) == told.reply["content"]
                half = len(turn["ids"]) // 2
                first = told.spans[0][0]
                assert turn["versions"][:half] == [first] * half
                assert set(turn["versions"][half:]) == {first + 1}


def test_lanes_add_up(written):
    (run,) = read_runs([Recording.open(written.folder)])
    found = lanes(run)
    assert list(found) == ["server 0", "server 1", "trainer"]
    for bars in found.values():
        for before, after in pairwise(bars):
            assert after.began >= before.ended - 1e-6

    def seconds(lane, state):
        return sum(b.ended - b.began for b in found[lane] if b.name == state)

    assert seconds("trainer", "training") == pytest.approx(2 * STEPS)
    assert seconds("trainer", "waiting") == pytest.approx(2.5 * STEPS)
    assert seconds("trainer", "sending") == pytest.approx(0.5 * STEPS)
    # Pause, flush and resume; begin, send and end.
    assert seconds("server 0", "paused") == pytest.approx(0.1 * STEPS, abs=0.1)
    assert seconds("server 0", "updating") == pytest.approx(0.4 * STEPS, abs=0.4)
    assert seconds("server 0", "generating") == pytest.approx(3 * STEPS, abs=1)


def test_groups_in_flight_are_those_that_run(written):
    (run,) = read_runs([Recording.open(written.folder)])
    found = in_flight(run)
    assert max(count for _, count in found) == written.per_batch
    for now, count in found:
        runs = [group for group in written.written if group.began <= now < group.ended]
        assert count == len(runs)


def test_many_groups_in_flight_keep_peaks_and_ends():
    run = RunData(name="run", folder="run")
    for burst in range(1000):
        run.running += [(burst + 0.01 * place, 1) for place in range(16)]
        run.running += [(burst + 0.5 + 0.01 * place, -1) for place in range(16)]
    shown = in_flight(run)
    assert len(shown) <= 600
    assert {count for _, count in shown} >= {0, 16}
    # All that ran was over before the next burst.
    assert [count for time, count in shown if time % 1 > 0.645] == [0] * sum(
        time % 1 > 0.645 for time, _ in shown
    )
    assert shown[-1][1] == 0


def test_an_update_takes_the_place_of_what_was_polled():
    bars = [Bar(name="generating", began=0, ended=10)]
    update = [Bar(name="updating", began=4, ended=5)]
    assert [(b.name, b.began, b.ended) for b in override(bars, update)] == [
        ("generating", 0, 4),
        ("updating", 4, 5),
        ("generating", 5, 10),
    ]


def test_many_bars_keep_their_shares_of_the_time():
    bars = [
        Bar(name="a" if n % 10 < 7 else "b", began=n, ended=n + 1)
        for n in range(100_000)
    ]
    found = thin(bars, 1500)
    assert len(found) <= 1500
    assert (found[0].began, found[-1].ended) == (0, pytest.approx(100_000))


def test_two_runs_are_in_the_same_curves(tmp_path):
    for name, seed in (("one", 0), ("two", 1)):
        write_run(tmp_path / name, steps=2, seed=seed)
    recordings = [Recording.open(tmp_path / name) for name in ("one", "two")]
    data = page_data(read_runs(recordings), now=0.0)
    assert [run["name"] for run in data["runs"]] == ["one", "two"]
    values = curve(data, "reward")["spec"]["data"]["values"]
    assert {point["run"] for point in values} == {"one", "two"}


def test_metrics_have_curves_of_their_own(tmp_path):
    """Whatever their names are, of runs that logged others, and many of them."""
    names = [
        ["Staleness", "batch/mine", "x"],
        ["x", "reward/right", *map(str, range(250))],
    ]
    for place, logged in enumerate(names):
        run = Recorded(tmp_path / str(place))
        for rank, name in enumerate(["engine/responses", *logged]):
            run.event("metrics", step=3, values={name: 10.0 * place + rank})
        run.step()
        run.close()
    recordings = [Recording.open(tmp_path / str(place)) for place in range(2)]
    data = page_data(read_runs(recordings), now=0.0)
    ids = [each["id"] for each in data["curves"]]
    assert len(set(ids)) == len(ids)
    assert {p["line"] for p in curve(data, "staleness")["spec"]["data"]["values"]} == {
        "0 updates"
    }
    of_title = {
        each["title"]: each for each in data["curves"] if each["id"] != "staleness"
    }
    for name, values in {
        "Staleness": {"0": 1.0},
        "batch/mine": {"0": 2.0},
        "x": {"0": 3.0, "1": 11.0},
        "train/loss": {"0": 1.0, "1": 1.0},
    }.items():
        points = of_title[name]["spec"]["data"]["values"]
        assert {point["run"]: point["y"] for point in points} == values
    # The curve of rewards has it, and parts come after what was learned.
    assert "reward/right" not in of_title
    titles = list(of_title)
    assert titles.index("train/loss") < titles.index("engine/responses")
    notes = [" ".join(run["notes"]) for run in data["runs"]]
    assert "metrics, at most 200 have curves" not in notes[0]
    assert "metrics, at most 200 have curves" in notes[1]


def test_a_teacher_has_curves_of_divergence_and_missed_probability(tmp_path):
    run = Recorded(tmp_path)
    names = ("distillation", "distillation_missed_nats", "distillation_missed")
    for rank, name in enumerate(names):
        run.event("metrics", step=1, values={f"train/{name}": float(rank)})
    run.step()
    run.close()
    data = page_data(read_runs([Recording.open(tmp_path)]), now=0.0)
    points = curve(data, "distillation")["spec"]["data"]["values"]
    assert [point["y"] for point in points] == [0.0, 1.0]
    (point,) = curve(data, "missed")["spec"]["data"]["values"]
    assert point["y"] == 2.0
    assert not any(each["title"].startswith("train/dist") for each in data["curves"])


def test_metrics_that_stay_the_same_are_in_one_table(tmp_path):
    run = Recorded(tmp_path)
    for step in range(900):
        values = {"lr": 1e-5 / 3, "grown": 1.0 + (step == 899), "failures": 0}
        run.event("metrics", step=step, values=values)
    run.event("metrics", step=3, values={"once": 7.0})
    run.step()
    run.close()
    data = page_data(read_runs([Recording.open(tmp_path)]), now=0.0)
    assert dict(data["constants"]) == {"lr": pytest.approx(1e-5 / 3), "failures": 0}
    titles = [each["title"] for each in data["curves"]]
    assert {"grown", "once"} <= set(titles)
    assert not {"lr", "failures"} & set(titles)


@pytest.mark.parametrize("seed", range(12))
def test_damage_of_any_file_costs_what_it_hits_alone(tmp_path, seed):
    written = write_run(tmp_path / "run", steps=4)
    rng = random.Random(seed)
    for path in sorted(written.folder.glob("*.jsonl")):
        content = path.read_bytes()
        for _ in range(20):
            place = rng.randrange(len(content))
            change = rng.choice(DAMAGE)
            content = content[:place] + change + content[place + len(change) :]
        path.write_bytes(content)
    recording = Recording.open(written.folder)
    data = json.loads(as_script(page_data(read_runs([recording]), now=0.0)))
    assert data["runs"][0]["groups"]["total"] > 0
    assert "<title>" in self_contained([recording], now=0.0)


def test_texts_cannot_leave_their_place_in_the_page(tmp_path):
    run = Recorded(tmp_path)
    run.event("failed", id=1, error="</script><script>alert(1)</script><!--data-->")
    run.step()
    run.close()
    page = self_contained([Recording.open(tmp_path)], now=0.0)
    data = re.search(
        r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL
    )
    content = json.loads(data[1])
    assert content["runs"][0]["failures"] == [
        "</script><script>alert(1)</script><!--data-->"
    ]
    assert not re.search(r'(?:src|href)="(?!data:|#)', page.partition("<body>")[0])


def test_a_run_without_anything_is_a_page(tmp_path):
    Recorded(tmp_path).close()
    recordings = [Recording.open(tmp_path)]
    data = page_data(read_runs(recordings), now=0.0)
    assert data["curves"] == []
    assert "not known yet" in data["runs"][0]["sentence"]
    assert "<title>" in page_html(data["title"], as_script(data))


@pytest.mark.slow
def test_a_hundred_thousand_responses_are_a_page(tmp_path):
    run = Recorded(tmp_path, size=8, groups=250, texts=False)
    run.step(tokens=4)
    run.close()
    multiply(tmp_path, 50, 250)
    recordings = [Recording.open(tmp_path)]
    data = page_data(read_runs(recordings), now=0.0)
    page_html(data["title"], as_script(data))
    assert data["runs"][0]["groups"]["responses"] == 100_000
    assert len(data["runs"][0]["groups"]["rows"]) <= MOST_ROWS


def multiply(folder, times, groups):
    """Writes the groups and batches of a step again and again, as those of later ones.

    Args:
        folder: of the recording.
        times: steps.
        groups: of a step.
    """
    (path,) = folder.glob("groups-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (events,) = folder.glob("events-*.jsonl")
    batch = next(
        event
        for event in map(json.loads, events.read_text().splitlines())
        if event["kind"] == "batch"
    )
    with path.open("w") as file, events.open("a") as more:
        for step in range(times):
            for line in lines:
                line["id"] += groups * bool(step)
                line["time"] = [each + 5.0 * bool(step) for each in line["time"]]
                for response in line["responses"]:
                    response["keys"] = [
                        f"{step}-{key[-16:]}" for key in response["keys"]
                    ]
                file.write(json.dumps(line) + "\n")
            if step:
                ids = [line["id"] for line in lines]
                batch |= {"number": step + 1, "ids": ids, "time": batch["time"] + 5.0}
                more.write(json.dumps(batch) + "\n")


def test_distributions_are_of_the_first_and_the_last_batches(data, written):
    size = 2 * written.per_batch
    for name, values_of in (
        ("reward", lambda group: [each.reward for each in group.responses]),
        ("length", lambda group: [tokens(each) for each in group.responses]),
    ):
        found = points(data, f"{name}_distribution", "batches 1 to 2")
        values = [v for group in written.written[:size] for v in values_of(group)]
        edges = sorted(found)
        width = min(b - a for a, b in pairwise(edges))
        for edge, share in found.items():
            within = [v for v in values if edge - 1e-9 <= v < edge + width - 1e-9]
            assert share == pytest.approx(len(within) / len(values))
        last = points(data, f"{name}_distribution", "batches 11 to 12")
        assert sum(last.values()) == pytest.approx(1)


def test_settings_are_shown_and_those_that_differ(tmp_path):
    runs = []
    for name, lr in (("a", 1e-6), ("b", 2e-6)):
        run = Recorded(tmp_path / name)
        run.event("start", settings={"commit": "c0ffee"})
        run.event("settings", values={"lr": lr, "lora": {"r": 8}, "seed": None})
        run.step()
        run.event("settings", values={"lr": 3e-6})
        run.close()
        runs += read_runs([Recording.open(tmp_path / name)])
    data = page_data(runs, now=BEGAN + 1e6)
    assert dict(data["runs"][0]["settings"]) == {
        "commit": "c0ffee",
        "lr": "1e-06, then 3e-06",
        "lora.r": "8",
        "seed": "null",
    }
    differences = [["lr", "1e-06, then 3e-06", "2e-06, then 3e-06"]]
    assert data["differences"] == differences
    assert page_data(runs[:1], now=BEGAN)["differences"] == []


def test_axes_count_tokens_and_time(data, written):
    progress = data["runs"][0]["progress"]
    total = sum(tokens(each) for group in written.written for each in group.responses)
    assert progress["tokens"][-1][1] == total
    assert [place for place, _ in progress["batch"]] == list(range(1, STEPS + 1))
    seconds = [second for _, second in progress["batch"]]
    assert seconds == pytest.approx([5 * step + 2.5 for step in range(STEPS)])
    assert [second for second, _ in progress["tokens"]] == seconds
    steps = [second for _, second in progress["step"]]
    assert steps == pytest.approx([5 * step + 5 for step in range(STEPS)])


def rows_of(data):
    table = data["runs"][0]["groups"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return {row["id"]: row for row in rows}


def test_held_out_responses_are_groups_and_in_no_curve(tmp_path):
    run = Recorded(tmp_path, prompts=9)
    for _ in range(3):
        run.step()
    run.evaluate()
    run.step()
    run.evaluate()
    run.close()
    data = page_data(read_runs([Recording.open(tmp_path)]), now=0)
    rows = rows_of(data)
    held_out = [row for row in rows.values() if "held-out" in row["tags"]]
    assert [(row["batch"], row["responses"]) for row in held_out] == [(4, 1), (3, 1)]
    assert not any("untrained" in row["tags"] for row in held_out)
    trained = run.written[-4:]
    assert points(data, "length", "tokens")[4] == pytest.approx(
        statistics.fmean(tokens(each) for group in trained for each in group.responses)
    )
    # A prompt is the same in each epoch, and held out.
    same = [id_ for id_, row in rows.items() if row["prompt"] == rows["4"]["prompt"]]
    key = rows["4"]["prompt_key"]
    assert same == ["13", "4"]
    assert key
    assert [id_ for id_, row in rows.items() if row["prompt_key"] == key] == same


def test_a_prompt_that_was_read_once_has_no_key(data):
    assert {row["prompt_key"] for row in rows_of(data).values()} == {""}


def test_a_search_reads_prompts_and_responses(written):
    recording = Recording.open(written.folder)
    (run,) = read_runs([recording])
    by_id = {str(group.id): group for group in written.written}
    for text in ("ANSWER is", "<script>", "nowhere"):
        found = search(recording, run.groups, text)
        assert (found["searched"], found["total"]) == (len(by_id), len(by_id))
        assert set(found["ids"]) == {
            name
            for name, group in by_id.items()
            for each in group.responses
            if text.lower()
            in "\n".join(turn.reply["content"] for turn in each.turns).lower()
        }
    assert search(recording, run.groups, "What is 7 + 2")["ids"] == ["7"]
    # Of the newest group alone, as there is no more time.
    assert search(recording, run.groups, "What", seconds=0.0)["searched"] <= 1
