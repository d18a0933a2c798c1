"""A run of a mixture of experts whose trainer replays the engine's routing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.csv_logs import logged
from helpers.routing import routers
from helpers.small_runs import few_tokens
from helpers.tiny_models import save_tiny_moe
from helpers.torchrun import run_ranks

from torchrl_sglang import GRPO, AsyncSGLang
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.objectives.routing import replay_of
from torchrl_sglang.trainers.models import load_model

PROGRAM = Path(__file__).with_name("train_program.py")
NOISE = 0.05
PROMPTS = [{"query": f"Say {n}.", "number": n} for n in range(12)]


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory):
    return str(save_tiny_moe(tmp_path_factory.mktemp("moe") / "model", num_layers=2))


@pytest.fixture(scope="module")
def moe_engine(moe_path):
    with AsyncSGLang.from_pretrained(
        moe_path, device="cpu", enable_return_routed_experts=True
    ) as engine:
        yield engine


def make(path, folder, **arguments):
    defaults = {
        "prompts": PROMPTS,
        "rewards": few_tokens,
        "generate_kwargs": {"max_new_tokens": 12},
        "group_size": 4,
        "groups_per_batch": 2,
        "steps": 3,
        "lr": 1e-2,
        "output": folder / "run",
        "logger": "csv",
        "replay_routing": True,
    }
    return GRPO(path, **{**defaults, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            {
                "gradient_checkpointing": True,
                "max_tokens_per_pass": 128,
                "kl_to_ref_coeff": 0.1,
            },
            marks=pytest.mark.slow,
        ),
        {"packing": "tree", "gradient_checkpointing": True, "kl_to_ref_coeff": 0.1},
        {"correction": "decoupled_token_is", "max_staleness": 1, "minibatches": 2},
    ],
)
def test_a_run(moe_engine, moe_path, tmp_path, arguments):
    """Each step replays what the engine chose with the weights that it had."""
    make(moe_path, tmp_path, engine=moe_engine, **arguments).train()
    flipped = logged(tmp_path, "train/flipped_experts")
    assert len(flipped) == 3
    if "minibatches" in arguments:
        # After the first step of a batch its routers are others, which not all of a few
        # short responses show.
        assert 0 < max(flipped) < 1
    else:
        assert flipped == [0, 0, 0]
        assert max(logged(tmp_path, "train/kl_approx")) < 1e-6
    if "packing" in arguments:
        assert min(logged(tmp_path, "train/tree_ratio")) > 1.2


def test_routers_that_differ(moe_engine, moe_path, tmp_path):
    """A trainer whose routers choose others uses the engine's, and says how many."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(moe_path, dtype=torch.float32).eval()
    with make(model, tmp_path, engine=moe_engine) as run:
        with torch.no_grad():
            torch.manual_seed(0)
            for router in routers(model):
                router.weight.add_(NOISE * torch.randn_like(router.weight))
        batch = next(iter(run.collector))
        gaps = []
        for row in batch.unbind(0):
            tokens, sampled = row["tokens", "full"], row["log_probs", "response"]
            experts = row["routed_experts", "full"][None]
            with torch.no_grad(), replay_of(model).using(experts):
                logits = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            found = logits.gather(-1, tokens[1:, None])[-len(sampled) :, 0]
            gaps.append(sampled - found)
        metrics = run.learner.train(run.advantage(batch), 0)
    assert metrics["train/flipped_experts"] > 0.01
    assert abs(metrics["train/kl_approx"] - torch.cat(gaps).mean()) < 1e-4


def test_the_reference_of_a_module_routes_by_itself(moe_engine, moe_path, tmp_path):
    model = load_model(moe_path, device=torch.device("cpu"))
    run = make(model, tmp_path, engine=moe_engine, kl_to_ref_coeff=0.1, steps=1)
    with run:
        reference = run.learner._reference
        assert replay_of(run.model) is not None
        assert replay_of(reference) is None
        own, trained = ({*model.parameters()} for model in (reference, run.model))
        assert not own & trained


def test_unsupported_runs_are_refused(engine, tiny_model_path, tmp_path):
    with pytest.raises(ConfigurationError, match="mixtures of experts, and"):
        make(tiny_model_path, tmp_path).train()
    with pytest.raises(UnsupportedByServerError, match="no mixture of experts"):
        make(tiny_model_path, tmp_path, engine=engine).train()
    with pytest.raises(ConfigurationError, match="replay_routing must be a bool"):
        make(tiny_model_path, tmp_path, replay_routing="yes")


@pytest.mark.slow
def test_ranks_of_torchrun(moe_engine, moe_path, tmp_path):
    """Rows reach each rank with its share of the batch."""
    options = {"replay_routing": True, "gradient_checkpointing": True}
    arguments = moe_path, moe_engine.server_url, tmp_path / "run", 2
    run_ranks(PROGRAM, *arguments, json.dumps(options), folder=tmp_path)
    assert logged(tmp_path, "train/flipped_experts") == [0.0, 0.0]
