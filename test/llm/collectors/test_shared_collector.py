"""Several ranks of a trainer with one collector: real processes, a real engine."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers.forked_starts import trainer_python
from helpers.log_probs import TOLERANCE, difference
from tensordict import TensorDict

from torchrl_sglang import SharedCollector
from torchrl_sglang.collectors.shared_collector import share_rows, share_trees
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.testing.tiny_model import make_tiny_model

PROGRAM = Path(__file__).with_name("shared_program.py")
TIMEOUT = 150.0
"""Seconds for four processes that import PyTorch and transformers on two busy cores."""


@pytest.fixture
def run(tmp_path, engine, tiny_model_path):
    """Runs a function of the program on ranks, and returns what each found."""

    def ranks(task: str, size: int, *, codes=(0,)) -> list:
        arguments = [str(tmp_path / task), engine.server_url, tiny_model_path, task]
        logs = [tmp_path / f"{task}{rank}.log" for rank in range(size)]
        processes = []
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        [trainer_python(), PROGRAM, str(rank), str(size), *arguments],
                        stdout=subprocess.PIPE,
                        stderr=file,
                        text=True,
                        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                    )
                )
        try:
            outputs = [each.communicate(timeout=TIMEOUT)[0] for each in processes]
        finally:
            for each in processes:
                each.kill()
                each.wait(60)
                each.stdout.close()
        said = "\n".join(log.read_text()[-1500:] for log in logs)
        assert all(each.returncode in codes for each in processes), said
        return [json.loads(output.splitlines()[-1]) for output in outputs]

    return ranks


@pytest.mark.parametrize(
    ("task", "count"),
    [
        ("difference_of_some_gradients", 6),
        pytest.param("difference_of_gradients", 18, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_does_not_depend_on_ranks_and_parts(run, task, count):
    first, *_ = run(task, 4)
    assert len(first) == count
    # Of float64; the model's rotary embeddings are float32, and padding moves them.
    assert max(first.values()) < 5e-6


def test_a_part_that_one_rank_refuses(run):
    first, second = run("bad_part", 2)
    refused = "Another rank of the trainer refused"
    assert first["advantage"].startswith(f"NotFiniteError: {refused}")
    assert "'advantage'" in second["advantage"]
    for name in ("forward", "backward", "parts"):
        assert first[name].startswith(f"SGLangError: {refused}")
        assert second[name] == "RuntimeError: no memory"


def test_parameters_that_the_tokens_of_one_rank_do_not_reach(run):
    first, second = run("unused_experts", 2)
    assert first == second == {"grads": [[0.5, 0.5], [1, 1], [0.5, 0.5], None]}


@pytest.mark.slow
def test_shares_of_a_collector(run, restored_engine, tokenizer):
    found = run("collect", 2)
    first, second = found
    assert first["versions"] == second["versions"] == [0, 1, 2]
    assert first["reports"] == second["reports"]
    assert len({*first["reports"]}) == 3
    model = make_tiny_model(tokenizer, seed=30)
    with torch.no_grad():
        for parameter in model.parameters():
            for _ in range(3):
                parameter.mul_(1.001)
    assert difference(restored_engine, model) < TOLERANCE
    assert first["last"] == second["last"] == 3
    for found in (first, second):
        assert found["ended"] == "The collector was shut down; make another one."
    answers = []
    for one, other in zip(first["shares"], second["shares"], strict=True):
        assert len(one) + len(other) == 8
        counts = [sum(len(values) for _, values in share) for share in (one, other)]
        # Of responses of at most 8 tokens.
        assert abs(counts[0] - counts[1]) <= 8
        answers += [answer for answer, _ in (*one, *other)]
    assert sorted(answers, key=int) == [str(n) for n in range(12) for _ in range(2)]


def test_the_first_rank_fails(run):
    first, second = run("failures", 2)
    made, collected, small, unsent = second
    assert first[0] == "LookupError: no collector"
    assert made == (
        "CollectionError: The rank that collects failed: LookupError: no collector"
    )
    for said in (first[1], collected):
        assert "no such key" in said
    for said in (first[2], small):
        assert "A batch of 1 responses cannot be shared by 2 ranks" in said
    for said in (first[3], unsent):
        assert "There is no scheme" in said


def test_what_cannot_be_told_to_other_ranks(run):
    first, second = run("misfits", 2)
    assert first[0] == "OwnError: only here"
    assert "OwnError: only here" in second[0]
    assert "NoneType" in first[1]
    assert first[2] == "LookupError: no batch"
    assert "LookupError: no batch" in second[2]
    assert "pickle" in first[3]
    assert "pickle" in second[3]
    assert first[4], "The collector goes on, and nobody has it."


def test_a_rest_that_ranks_cannot_share_is_left_out(run):
    assert run("rest", 2) == [[[3, 2], []]] * 2


def test_a_rank_that_is_lost(run):
    first, second = run("lost", 2, codes=(0, 1))
    assert second == "gone"
    assert first.startswith("CollectionError: A rank of the trainer was lost")


def test_shares_are_as_equal_as_whole_responses_allow():
    lengths = [100, 1, 1, 1, 50, 49, 2, 96]
    rows = [
        TensorDict(
            masks=TensorDict(all_assistant_mask=torch.ones(length, dtype=torch.bool))
        )
        for length in lengths
    ]
    for count in (1, 2, 3, 4, 8):
        shares = share_rows(rows, count)
        assert {id(row) for share in shares for row in share} == {*map(id, rows)}
        assert all(shares)
        totals = [
            sum(int(row["masks", "all_assistant_mask"].sum()) for row in share)
            for share in shares
        ]
        assert max(totals) <= max(100, sum(lengths) / count + 50)
    with pytest.raises(ConfigurationError, match="8 responses cannot be shared by 9"):
        share_rows(rows, 9)


def test_trees_are_on_one_rank_where_shares_stay_equal():
    groups = [[[7, group, *range(20), 50 + n] for n in range(4)] for group in range(6)]
    rows = [TensorDict(tokens={"full": torch.tensor(ids)}) for ids in chain(*groups)]
    dealt = [rows[5 * index % len(rows)] for index in range(len(rows))]
    for count, computed in ((1, 1 + 6 * 25), (2, 2 + 6 * 25), (3, 3 + 6 * 25)):
        shares = share_trees(dealt, count)
        assert {id(row) for share in shares for row in share} == {*map(id, rows)}
        paths = [
            {
                tuple(ids[:end])
                for row in share
                for ids in [row["tokens", "full"].tolist()]
                for end in range(1, len(ids) + 1)
            }
            for share in shares
        ]
        assert sum(map(len, paths)) == computed
        assert max(map(len, paths)) <= computed / count + 25
    assert all(len(share) == 1 for share in share_trees(dealt, len(rows)))
    for row in dealt[:8]:
        # Nothing of it is trained on.
        row["masks"] = {"all_assistant_mask": torch.zeros(26, dtype=torch.bool)}
        row["tokens", "full"][0] = 1
    for count in (2, 3):
        shares = share_trees(dealt, count)
        assert {id(row) for share in shares for row in share} == {*map(id, rows)}
        assert all(any("masks" not in row for row in share) for share in shares)
    with pytest.raises(ConfigurationError, match="24 responses cannot be shared by 25"):
        share_trees(rows, 25)


def test_without_ranks():
    with pytest.raises(ConfigurationError, match="init_process_group"):
        SharedCollector(lambda: None)
