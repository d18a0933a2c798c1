"""``SFTLoss`` equals the loss of transformers for labels, alone and in a learner."""

from __future__ import annotations

import copy
import math

import openai
import pytest
import torch
from helpers.learner_batches import make_row
from tensordict import TensorDict, lazy_stack
from torch.nn.utils.rnn import pad_sequence
from torchrl.modules.llm import Text
from torchrl.objectives.llm import SFTLoss as TorchRLSFTLoss

from torchrl_sglang import (
    Gateway,
    Learner,
    SFTLoss,
    SGLangWrapper,
    dataset_to_batch,
    load_rollouts,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.trainers.models import scorer

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = (3, 9, 1, 6)


@pytest.fixture
def batch():
    """Rows of different lengths, one with a second turn, and without a rollout."""
    rows = [make_row(number, 0.0, length) for number, length in enumerate(LENGTHS)]
    rows[1]["masks", "all_assistant_mask"][6:8] = False
    return lazy_stack([row.exclude("log_probs", "next") for row in rows])


def labels_of(batch, strategy="rlhf"):
    """Returns padded tokens, attention and labels, as transformers has them."""
    rows = batch.unbind(0)
    tokens = [row["tokens", "full"] for row in rows]
    masks = [row["masks", "all_assistant_mask"] for row in rows]
    if strategy == "generic":
        masks = [torch.ones_like(mask) for mask in masks]
    pairs = zip(tokens, masks, strict=True)
    labels = [ids.masked_fill(~mask, -100) for ids, mask in pairs]
    attention = [torch.ones_like(ids) for ids in tokens]
    values = ((tokens, 0), (attention, 0), (labels, -100))
    return [pad_sequence(v, batch_first=True, padding_value=p) for v, p in values]


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("cut", [4, 1])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("strategy", ["rlhf", "generic"])
def test_value_and_gradient_equal_transformers(
    hf_model, tokenizer, batch, strategy, packing, cut
):
    """Of a single pass, and of a pass for each row."""
    twin = copy.deepcopy(hf_model)
    tokens, attention, labels = labels_of(batch, strategy)
    expected = twin(tokens, attention, labels=labels).loss
    expected.backward()
    actor = scorer(hf_model, tokenizer)
    loss = SFTLoss(actor, packing=packing, masking_strategy=strategy)
    output = loss.accumulate(batch.split(cut))
    assert abs(output.loss_objective - expected) < 1e-5
    assert (gradients(hf_model) - gradients(twin)).abs().max() < 1e-5
    assert gradients(twin).abs().max() > 1e-2


def test_a_learner_learns_the_rows_that_have_loss_tokens(hf_model, tokenizer, batch):
    batch[3]["masks", "all_assistant_mask"][:] = False
    optimizer = torch.optim.AdamW(hf_model.parameters(), lr=1e-2)
    loss = SFTLoss(scorer(hf_model, tokenizer))
    learner = Learner(loss, optimizer, minibatches=2, max_tokens_per_pass=16)
    history = [learner.train(batch) for _ in range(12)]
    assert history[0]["train/unscored"] == 1 / 4
    assert history[-1]["train/loss"] < 0.5 * history[0]["train/loss"]
    assert all(map(math.isfinite, history[-1].values()))


@pytest.mark.servers
def test_rows_of_a_policy_and_of_a_gateways_file(engine, hf_model, tokenizer, tmp_path):
    """The loss is the mean of minus the log-probs that the engine sampled with."""
    policy = SGLangWrapper(
        engine,
        input_mode="text",
        generate_kwargs={"max_new_tokens": 7},
        return_log_probs=True,
    )
    text = Text(prompt=["Hi", "How are you?"], batch_size=(2,))
    collected = policy(TensorDict(text=text, batch_size=(2,)))
    file = tmp_path / "sessions.db"
    with Gateway(engine, path=file) as gateway:
        session = gateway.session()
        client = openai.OpenAI(base_url=session.base_url, api_key=session.key)
        with client:
            client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=7,
            )
    loss = SFTLoss(scorer(hf_model, tokenizer))
    for rows in (collected, dataset_to_batch(load_rollouts(file))):
        known = torch.cat([row["log_probs", "full"] for row in rows.unbind(0)])
        written = torch.cat(
            [row["masks", "all_assistant_mask"] for row in rows.unbind(0)]
        )
        expected = -known[written].mean()
        assert abs(loss(rows).loss_objective - expected) < 1e-4


def test_wrong_uses_are_refused(hf_model, tokenizer, batch):
    actor = scorer(hf_model, tokenizer)
    optimizer = torch.optim.SGD(hf_model.parameters())
    with pytest.raises(ConfigurationError, match="reference='adapter' is not read"):
        Learner(SFTLoss(actor), optimizer, reference="adapter")
    with pytest.raises(ConfigurationError, match=r"or SFTLoss of torchrl_sglang"):
        Learner(TorchRLSFTLoss(actor), optimizer)
    with pytest.raises(ConfigurationError, match="masking_strategy"):
        SFTLoss(actor, masking_strategy="assistant")
    text_actor = copy.copy(actor)
    text_actor.input_mode = "text"
    with pytest.raises(ConfigurationError, match="needs an actor of tokens"):
        SFTLoss(text_actor)
    learner = Learner(SFTLoss(actor), optimizer)
    with pytest.raises(ConfigurationError, match="lacks"):
        SFTLoss(actor)(batch.exclude("masks"))
    for row in batch.unbind(0):
        row["masks", "all_assistant_mask"][:] = False
    with pytest.raises(ConfigurationError, match="No row of the batch has a loss tok"):
        learner.train(batch)
