"""Replay of sampling: log-probs over the support and at the temperature of each token.

The oracle is written by hand: Hugging Face's logits of each sequence alone, in float64,
divided by the temperature, minus infinity outside of the support.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.sampled_batches import Case, make_batch, make_case
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_sglang import CorrectedGRPOLoss, OffPolicyCorrection, replay_sampling
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives import token_terms as terms
from torchrl_sglang.objectives.support import Drawn

VOCABULARY = 23
CLIP = 0.2

DrawnRow = list[tuple[float, list[int]]]
"""Temperature and support of each token of a row; no support: the whole vocabulary."""


def make_model():
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval().double()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model


def draw(case: Case, seed: int = 0) -> list[DrawnRow]:
    """Returns supports of 1 to all tokens, and none, in all orders."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for row in case.rows:
        drawn: DrawnRow = [(1.0, [])] * len(row.prompt)
        for token in row.tokens:
            order = torch.randperm(VOCABULARY, generator=generator).tolist()
            size = int(torch.randint(0, VOCABULARY + 1, (), generator=generator))
            kept = [each for each in order if each != token][: max(size - 1, 0)]
            kept.insert(len(kept) // 2, token)
            warm = 0.5 + float(torch.rand((), generator=generator))
            drawn.append((warm, kept if size else []))
        found.append(drawn)
    return found


def add(batch: TensorDictBase, drawn: list[DrawnRow], layout: str) -> TensorDictBase:
    """Adds the columns of ``logprobs_mode="behaviour"``."""
    rows = [
        {
            "temperatures": torch.tensor([warm for warm, _ in row]),
            "counts": torch.tensor([len(kept) for _, kept in row]),
            "ids": torch.tensor([i for _, kept in row for i in kept]).int(),
        }
        for row in drawn
    ]
    if layout == "ragged":
        for row, each in zip(batch.unbind(0), rows, strict=True):
            row["sampling_temperature"] = TensorDict(full=each["temperatures"])
            row["sampling_support"] = TensorDict(
                full=each["ids"], full_counts=each["counts"]
            )
        return batch

    def pad(name, value, side):
        return pad_sequence([row[name] for row in rows], True, value, side)

    batch["sampling_temperature"] = TensorDict(
        full=pad("temperatures", 1.0, "left"), batch_size=len(rows)
    )
    batch["sampling_support"] = TensorDict(
        full=pad("ids", -1, "right"),
        full_counts=pad("counts", 0, "left"),
        batch_size=len(rows),
    )
    return batch


def distributions(model, case: Case, drawn: list[DrawnRow]):
    """Returns for each row the log-probs at each place of its response."""
    found = []
    for row, sampled in zip(case.rows, drawn, strict=True):
        ids = torch.tensor([[*row.prompt, *row.tokens]])
        logits = model(ids).logits[0, :-1]
        rows = []
        for place in range(len(row.prompt), ids.shape[1]):
            warm, kept = sampled[place]
            scaled = logits[place - 1] / torch.tensor(warm).double()
            if kept:
                mask = torch.zeros(VOCABULARY, dtype=torch.bool)
                mask[kept] = True
                scaled = scaled.masked_fill(~mask, -1e30)
            rows.append(scaled.log_softmax(-1))
        found.append(rows)
    return found


def expected_loss(model, case: Case, drawn: list[DrawnRow], entropy_coeff: float):
    """Returns GRPO's clipped loss with an entropy bonus, token by token."""
    losses, entropies = [], []
    for row, found in zip(case.rows, distributions(model, case, drawn), strict=True):
        for token, rollout, log_probs in zip(
            row.tokens, row.rollout, found, strict=True
        ):
            ratio = (log_probs[token] - rollout).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            losses.append(
                -torch.minimum(ratio * row.advantage, clipped * row.advantage)
            )
            probs = log_probs.exp()
            entropies.append(-(probs * log_probs.clamp_min(-1e4)).sum())
    loss, entropy = torch.stack(losses).mean(), torch.stack(entropies).mean()
    return loss - entropy_coeff * entropy, entropy


def as_rollout(case: Case, model, drawn: list[DrawnRow], shift: float = 0.0) -> Case:
    """Makes the model the policy that sampled, or nearly."""
    with torch.no_grad():
        found = distributions(model, case, drawn)
    for row, rows in zip(case.rows, found, strict=True):
        row.rollout = [
            float(each[token]) + shift * (-1) ** t
            for t, (token, each) in enumerate(zip(row.tokens, rows, strict=True))
        ]
    return case


def actor_of(model, tokenizer, **options):
    return TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, **options
    )


def gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.fixture
def case():
    return as_rollout(make_case(4), make_model(), draw(make_case(4)), 0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_loss_and_gradient_are_those_by_hand(case, tokenizer, size, layout, packing):
    """However the batch is cut into passes, and into pieces within them."""
    model = make_model()
    wanted, entropy = expected_loss(model, case, draw(case), 0.3)
    wanted.backward()
    own = copy.deepcopy(model)
    own.zero_grad()
    loss = CorrectedGRPOLoss(
        actor_of(own, tokenizer),
        clip_epsilon=CLIP,
        entropy_coeff=0.3,
        masking_strategy="rlhf",
        packing=packing,
    )
    batch = add(make_batch(case, layout), draw(case), layout)
    output = loss.accumulate(batch.split(size))
    found = output.loss_objective + output.loss_entropy
    assert abs(float(found) - float(wanted)) < 1e-6
    assert abs(float(output.entropy) - float(entropy)) < 1e-6
    expected = gradients(model)
    assert any(each.any() for each in expected.values())
    for name, gradient in gradients(own).items():
        assert (gradient - expected[name]).abs().max() < 1e-6, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["sft", "rlhf"])
def test_torchrls_loss(case, tokenizer, strategy):
    """TorchRL's ``GRPOLoss``, with an actor whose sampling is replayed."""
    model = make_model()
    wanted, _ = expected_loss(model, case, draw(case), 0.0)
    wanted.backward()
    own = copy.deepcopy(model)
    own.zero_grad()
    actor = actor_of(own, tokenizer)
    loss = GRPOLoss(
        actor, clip_epsilon=CLIP, entropy_bonus=False, masking_strategy=strategy
    )
    batch = add(make_batch(case, "ragged"), draw(case), "ragged")
    plain = actor(batch.copy()).get(("log_probs", "full"), as_list=True)
    with replay_sampling(actor):
        objective = loss(batch.copy()).loss_objective
        objective.backward()
        scored = actor(batch.copy()).get(("log_probs", "full"), as_list=True)
        entropies = loss.actor_network._get_rlhf_dist(batch.copy()).entropy()
    assert abs(float(objective) - float(wanted)) < 1e-6
    for name, gradient in gradients(model).items():
        assert (gradients(own)[name] - gradient).abs().max() < 1e-6, name
    found = distributions(model, case, draw(case))
    for index, (row, each) in enumerate(zip(case.rows, found, strict=True)):
        for place, (token, log_probs) in enumerate(zip(row.tokens, each, strict=True)):
            own_place = place - len(row.tokens)
            assert abs(scored[index][own_place] - log_probs[token]) < 1e-6
            entropy = torch.special.entr(log_probs.exp()).sum()
            assert abs(entropies[index, own_place] - entropy) < 1e-6
    # Outside of the block it is the model again.
    again = actor(batch.copy()).get(("log_probs", "full"), as_list=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("packing", [False, True])
def test_the_first_ratio_is_one(tokenizer, packing):
    """And without replay it is not: the warning says so, once."""
    model = make_model()
    case = as_rollout(make_case(4), model, draw(make_case(4)))
    batch = add(make_batch(case, "ragged"), draw(case), "ragged")
    actor = actor_of(model, tokenizer)
    loss = CorrectedGRPOLoss(actor, clip_epsilon=CLIP, packing=packing)
    output = loss(batch)
    assert abs(float(output.kl_approx)) < 1e-6
    assert abs(float(output.ESS) - 1) < 1e-6
    other = CorrectedGRPOLoss(actor, clip_epsilon=CLIP, replay_sampling=False)
    with pytest.warns(RuntimeWarning, match="replay_sampling=True"):
        assert abs(float(other(batch).kl_approx)) > 0.1


@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_another_mode_are_the_models_own(tokenizer, packing):
    """As after a run that goes on in another mode; nothing of the others is lost."""
    model, drawn = make_model(), draw(make_case(4))
    drawn[0] = [(1.0, [])] * len(drawn[0])
    case = as_rollout(make_case(4), model, drawn)
    rows = list(add(make_batch(case, "ragged"), drawn, "ragged").unbind(0))
    rows[0] = rows[0].exclude("sampling_temperature", "sampling_support")
    batch = lazy_stack(rows)
    actor = actor_of(model, tokenizer)
    output = CorrectedGRPOLoss(actor, clip_epsilon=CLIP, packing=packing)(batch)
    assert abs(float(output.kl_approx)) < 1e-6
    assert abs(float(output.ESS) - 1) < 1e-6
    other = CorrectedGRPOLoss(actor, clip_epsilon=CLIP, replay_sampling=False)
    with pytest.warns(RuntimeWarning, match="replay_sampling=True"):
        other(batch)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr("torchrl_sglang.objectives.support._told", set())


@pytest.mark.parametrize("packing", [False, True])
def test_a_neutral_batch_is_computed_as_one_without_columns(case, tokenizer, packing):
    found = []
    neutral = [[(1.0, []) for _ in row] for row in draw(case)]
    plain = make_batch(case, "ragged")
    for batch in (plain, add(make_batch(case, "ragged"), neutral, "ragged")):
        model = make_model()
        loss = CorrectedGRPOLoss(
            actor_of(model, tokenizer), clip_epsilon=CLIP, packing=packing
        )
        output = loss.accumulate([batch])
        found.append((output.loss_objective, gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name])


def test_the_correction_reads_the_replayed_policy(tokenizer):
    """The trainer's log-probs of the transform are those of the same distributions."""
    model = make_model()
    case = as_rollout(make_case(4), model, draw(make_case(4)))
    batch = add(make_batch(case, "ragged"), draw(case), "ragged")
    actor = actor_of(model, tokenizer)
    correction = OffPolicyCorrection(
        "decoupled_token_is", actor_network=actor, masking_strategy="rlhf"
    )
    with pytest.warns(RuntimeWarning, match=r"replay_sampling\(actor\)"):
        correction(batch)
    assert correction.metrics["rollout_corr/k3_kl"] > 0.01
    with replay_sampling(actor):
        correction(batch)
    assert abs(correction.metrics["rollout_corr/k3_kl"]) < 1e-6


@pytest.mark.parametrize("numbers", [2**26, 3 * VOCABULARY, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replayed", [False, True])
def test_terms_in_pieces(replayed, dtype, numbers, monkeypatch):
    """In pieces of few rows, of which the last one is not full."""
    monkeypatch.setattr(terms, "_NUMBERS_AT_ONCE", numbers)
    case = make_case(4)
    drawn = [each if replayed else (1.0, []) for row in draw(case) for each in row]
    tokens = torch.tensor([t for row in case.rows for t in (*row.prompt, *row.tokens)])
    torch.manual_seed(0)
    values = (torch.randn(len(tokens), VOCABULARY) * 4).to(dtype)
    # A token that the model excludes.
    values[0, int(tokens[0]) - 1] = -torch.inf
    leaves = [values.clone().requires_grad_() for _ in range(2)]
    sampling = Drawn(
        temperatures=torch.tensor([warm for warm, _ in drawn]),
        counts=torch.tensor([len(kept) for _, kept in drawn]),
        ids=torch.tensor([i for _, kept in drawn for i in kept]),
    )
    *found, _ = terms.token_terms(
        leaves[0] * 1, tokens, entropy=True, sampling=sampling if replayed else None
    )
    scaled = leaves[1].double() / sampling.temperatures.double().unsqueeze(-1)
    outside = torch.zeros(values.shape, dtype=torch.bool)
    for row, (_, kept) in zip(outside, drawn, strict=True):
        row[[i for i in range(VOCABULARY) if kept and i not in kept]] = True
    normed = scaled.masked_fill(outside, -1e30).clamp_min(-1e30).log_softmax(-1)
    entropy = -(normed.exp() * normed.clamp_min(-1e4)).sum(-1)
    expected = (normed.gather(-1, tokens[:, None])[:, 0], entropy)
    weights = torch.randn(2, len(tokens), dtype=torch.float64)
    for terms_of in (found, expected):
        sum((w * t).sum() for w, t in zip(weights, terms_of, strict=True)).backward()
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for own, other in zip(found, expected, strict=True):
        assert (own - other).abs().max() < bound
    gap = (leaves[0].grad - leaves[1].grad).abs().max()
    assert gap < (0.05 if dtype == torch.bfloat16 else bound)


def test_invalid_arguments_are_refused(case, tokenizer):
    model = make_model()
    loss = CorrectedGRPOLoss(actor_of(model, tokenizer), clip_epsilon=CLIP)

    def change(key, position, value):
        batch = add(make_batch(case, "ragged"), draw(case), "ragged")
        batch[0][key][position] = value
        return batch

    support = ("sampling_support", "full")
    others = change(support, slice(None), VOCABULARY - 1)
    with pytest.raises(ConfigurationError, match="0 times among the .* must be there"):
        loss(others)
    short = add(make_batch(case, "ragged"), draw(case), "ragged")
    short[0].set(support, short[0][support][:-1])
    with pytest.raises(ConfigurationError, match="ids in a row whose"):
        loss(short)
    size = model.config.vocab_size
    (place,) = (short[0][support] != case.rows[0].tokens[-1]).nonzero()[-1].tolist()
    with pytest.raises(ConfigurationError, match=f"the model has {size} tokens"):
        loss(change(support, place, size + 5))
    cold = ("sampling_temperature", "full")
    with pytest.raises(ConfigurationError, match="is 0.0; it must be above 0"):
        loss(change(cold, -1, 0.0))
    text = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    packed = actor_of(model, tokenizer, pad_model_input=False)
    for wrong, words in (
        (text, "input_mode='tokens'"),
        (packed, "pad_model_input=True"),
        (model, "got Qwen2ForCausalLM"),
    ):
        with pytest.raises(ConfigurationError, match=words), replay_sampling(wrong):
            raise AssertionError
    actor = actor_of(model, tokenizer)
    with (
        replay_sampling(actor),
        pytest.raises(ConfigurationError, match="already"),
        replay_sampling(actor),
    ):
        raise AssertionError


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made, but for the logits' memory."""

    def __init__(self, logits):
        super().__init__()
        self.own, self.size = logits.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if (
                isinstance(each, torch.Tensor)
                and each.untyped_storage().data_ptr() != self.own
            ):
                self.size = max(self.size, each.numel())
        return found


@pytest.mark.parametrize("most", [0, 16])
def test_no_second_copy_of_the_logits(most, monkeypatch):
    """Nothing is as large, whether tokens have supports or temperatures alone."""
    tokens, vocabulary = 64, 1000
    monkeypatch.setattr(terms, "_NUMBERS_AT_ONCE", 4 * vocabulary)
    torch.manual_seed(0)
    leaf = torch.randn(tokens, vocabulary).requires_grad_()
    logits = leaf * 1
    chosen = torch.randint(0, vocabulary, (tokens,))
    others = torch.arange(1, max(most, 1))
    kept = (chosen.unsqueeze(-1) + torch.cat([torch.zeros(1), others])) % vocabulary
    sampling = Drawn(
        temperatures=torch.full((tokens,), 0.7),
        counts=torch.full((tokens,), most),
        ids=kept.flatten().long() if most else torch.zeros(0).long(),
    )
    with Largest(logits) as seen:
        found, entropies, _ = terms.token_terms(
            logits, chosen, entropy=True, sampling=sampling
        )
        (gradient,) = torch.autograd.grad((found + entropies).sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr()
    assert seen.size <= 4 * vocabulary


@pytest.mark.filterwarnings("ignore")
def test_earlier_forward_patch_is_kept(tokenizer):
    """As by a replay of routing, whose block is around this one."""
    actor = actor_of(make_model(), tokenizer)
    seen, forward = [], actor.forward

    def other(*args, **kwargs):
        seen.append(1)
        return forward(*args, **kwargs)

    actor.forward = other
    case = as_rollout(make_case(4), make_model(), draw(make_case(4)))
    with replay_sampling(actor):
        actor(add(make_batch(case, "ragged"), draw(case), "ragged"))
    assert seen == [1]
    assert vars(actor)["forward"] is other
    assert "_compute_log_probs_from_model_output" not in vars(actor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("most", [0, 50, 4096])
def test_on_a_gpu(most):
    """As on a CPU, in bfloat16, and in the memory of the logits and some pieces."""
    tokens, vocabulary = 4096, 151_936
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, vocabulary, (tokens,), generator=generator)
    kept = (chosen.unsqueeze(-1) + 7 * torch.arange(most)) % vocabulary
    drawn = Drawn(
        temperatures=torch.full((tokens,), 0.7),
        counts=torch.full((tokens,), most),
        ids=kept.flatten(),
    )
    on_gpu = Drawn(
        temperatures=drawn.temperatures.cuda(),
        counts=drawn.counts.cuda(),
        ids=drawn.ids.cuda(),
    )
    logits = torch.randn(tokens, vocabulary, device="cuda", dtype=torch.bfloat16)
    logits.requires_grad_()
    few = slice(0, 32)
    wanted = logits[few].detach().cpu().double() / drawn.temperatures[few, None]
    wanted.requires_grad_()
    values = wanted.gather(-1, kept[few]) if most else wanted
    expected = wanted.gather(-1, chosen[few, None])[:, 0] - values.logsumexp(-1)
    expected.sum().backward()
    own = logits * 1
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found, *_ = terms.token_terms(own, chosen.cuda(), entropy=True, sampling=on_gpu)
    (gradient,) = torch.autograd.grad(found.sum(), own)
    peak = torch.cuda.max_memory_allocated() - before
    assert gradient.data_ptr() == own.data_ptr()
    assert peak < 6 * 4 * terms._NUMBERS_AT_ONCE
    assert (found[few].cpu() - expected).abs().max() < 1e-4
    error = (gradient[few].cpu().double() - wanted.grad / 0.7).abs()
    assert error.max() < 0.02
