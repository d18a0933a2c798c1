"""The example in short: it collapses without a correction and learns with one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "off_policy" / "train.py"
SETTINGS = ("32 updates old", "noise of the logits: 4", "one of two servers stuck")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("off_policy_example", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_it_is_learnt_with_correction_only(example, setting):
    """Mean of four runs, halfway; chance is 1/8."""
    config = example.Config(steps=100, evaluate_every=100, runs=4)
    shares = {
        method: list(
            example.train(config, example.SETTINGS[setting], example.METHODS[method])
        )[-1][1]
        for method in ("not corrected", "token TIS")
    }
    assert shares["not corrected"].mean() < 0.3
    assert shares["token TIS"].mean() > 0.7


def test_on_policy_a_correction_changes_nothing(example):
    config = example.Config(steps=3, evaluate_every=3, runs=2)
    plain, corrected = (
        list(example.train(config, example.Setting(), example.METHODS[method]))
        for method in ("GRPOLoss alone", "token TIS")
    )
    torch.testing.assert_close(plain[-1][1], corrected[-1][1])


@pytest.mark.slow
def test_the_figure(example, tmp_path):
    config = example.Config(steps=4, evaluate_every=2, runs=2)
    curves = example.compare(config)
    assert set(curves) == {example.ON_POLICY, *SETTINGS}
    curve = curves["32 updates old"]["token TIS"]
    assert curve.steps == [0, 2, 4]
    assert curve.shares.shape == (3, 2)
    assert example.plot(curves, tmp_path / "figure.png").stat().st_size > 1000


def test_the_engine_is_as_stale_as_it_should_be(example):
    policy = example.Policy(example.Config(runs=1))
    engine = example.Engine(policy, example.Setting(staleness=2))
    for update in range(1, 6):
        policy.head.data.fill_(update)
        engine.update(policy)
    assert engine.weights[0].head.unique().tolist() == [3]


def test_half_of_the_responses_come_from_the_stuck_server(example):
    config = example.Config(runs=1)
    policy = example.Policy(config)
    # The first weights write anything, the new ones nothing but token 2.
    policy.head.data.zero_()
    engine = example.Engine(policy, example.Setting(stuck=0.5))
    policy.embeddings[0].data.fill_(1.0)
    for table in policy.embeddings[1:]:
        table.data.zero_()
    policy.head.data[..., 2] = 10.0
    engine.update(policy)
    batch = engine.generate(torch.zeros(400, dtype=torch.int64))
    updated = (batch["tokens", "full"][:, 1:] == 2).all(-1)
    assert 0.4 < updated.float().mean() < 0.6
    log_probs = batch["log_probs", "full"][:, 1:]
    assert (log_probs[updated] > -1e-3).all()
    chance = torch.full_like(log_probs[~updated], 1 / config.vocabulary).log()
    torch.testing.assert_close(log_probs[~updated], chance)
