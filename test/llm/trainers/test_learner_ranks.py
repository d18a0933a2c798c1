"""A learner on several ranks learns as one process, and fails as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.torchrun import run_ranks

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, "all"),
        (3, "each"),
    ],
)
def test_weights_and_metrics_do_not_depend_on_ranks(ranks, cases):
    """With each method and correction, several steps a batch, shares of unequal sizes,
    and a rank all of whose responses a correction rejects.
    """
    program = FOLDER / "one_batch_program.py"
    found = json.loads(run_ranks(program, cases, ranks=ranks, timeout=380))
    assert found
    wrong = {
        case: (distance, metrics)
        for case, (distance, metrics) in found.items()
        if not distance < 1e-6 or metrics
    }
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_error_of_one_rank_is_one_of_all():
    """A step is skipped on all ranks or on none, and no rank waits for another."""
    program = FOLDER / "agreement_program.py"
    printed = run_ranks(program)
    found = json.loads(printed.splitlines()[-1])
    skipped, refused = [1.0, 1.0], ["ConfigurationError"] * 2
    assert found == {
        "nan": skipped,
        "the user's loss": skipped,
        "the user's accumulate": skipped,
        "the user's correction": skipped,
        "gradient": skipped,
        "two losses": ["SGLangError"] * 2,
        "nan, and no masks": refused,
        "no advantage": refused,
        "no log-probs": refused,
        "unscored": refused,
        "model": ["SGLangError"] * 2,
    }
