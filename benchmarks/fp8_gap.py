r"""How far a real model in block FP8 is from itself, and what correction leaves of it.

No GPU is needed: FP8 is computed in float32, with weights as ``rollout_dtype="fp8"``
sends them, and with the inputs of linear layers rounded as SGLang's kernels do, a scale
for each 128 of a token. The model of the servers samples responses, and the
trainer's, in bfloat16 or float32, scores them.

    python benchmarks/fp8_gap.py runs/smollm2-135m-instruct

Besides the metrics of a run, the error of the policy gradient is printed that comes of
sampling from the other model. It is exact: for each prefix the gradient by the logits
is a sum over the vocabulary, :math:`\sum_v q(v) w(v) A(v) (e_v - \pi(v))`, with an
advantage of 1 or -1 for each token of the vocabulary by chance, where :math:`q` is the
trainer's policy, or the servers' with weights :math:`w` of 1 or of truncated importance
sampling.
"""

from __future__ import annotations

import statistics
import sys

import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from script import print_row, read_options
from torchrl_sglang.objectives.formulas import importance_weights, truncate
from torchrl_sglang.objectives.metrics import mismatch_metrics, weight_metrics
from torchrl_sglang.weight_update.encodings.block_fp8 import (
    BLOCK,
    FP8,
    GREATEST,
    BlockFP8,
    decode,
)
from torchrl_sglang.weight_update.weights import TensorSpec

QUESTIONS = (
    "What is {a} plus {b}? Explain it step by step.",
    "Write a short story about {a} foxes and {b} hens.",
    "Which is larger, {a} or {b}, and why?",
    "List {a} things that one can do with {b} dollars.",
)


def quantise_weights(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Rounds the weights that are sent in FP8; returns the layers that have them."""
    encoding, layers = BlockFP8(), []
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        spec = TensorSpec(name=name, dtype=parameter.dtype, shape=parameter.shape)
        if len(encoding.plan(spec)) == 2:
            values, scales = encoding.encode(spec, parameter.detach())
            parameter.data.copy_(decode(values, scales))
            layers.append(modules[name.removesuffix(".weight")])
    return layers


def quantise_inputs(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Rounds what a layer reads, with a scale for each 128 values of a token."""
    (value,) = inputs
    width = value.shape[-1]
    groups = pad(value.float(), (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / GREATEST
    rounded = (groups / scale).to(FP8).float() * scale
    return rounded.flatten(-2)[..., :width].to(value.dtype)


def make_prompts(tokenizer: object, count: int) -> list[str]:
    """Returns prompts in the model's template."""
    texts = [
        QUESTIONS[index % len(QUESTIONS)].format(a=3 + index, b=7 + 2 * index)
        for index in range(count)
    ]
    return [
        tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for text in texts
    ]


def gradient_error(
    own: torch.Tensor, other: torch.Tensor, weights: torch.Tensor, signs: torch.Tensor
) -> torch.Tensor:
    """Returns the relative error of each prefix's gradient, ``(T,)``.

    Args:
        own: probabilities of the trainer's model, ``(T, V)``.
        other: of the model that samples.
        weights: that its samples get.
        signs: advantages of the vocabulary, ``(V,)``.
    """

    def gradient(mass: torch.Tensor) -> torch.Tensor:
        scored = mass * signs
        return scored - own * scored.sum(-1, keepdim=True)

    exact = gradient(own)
    error = gradient(other * weights) - exact
    return error.norm(dim=-1) / exact.norm(dim=-1)


@torch.no_grad()
def main() -> None:
    """Samples, scores, and prints."""
    options = read_options(
        __doc__,
        model="runs/smollm2-135m-instruct",
        prompts=64,
        tokens=96,
        upper=2.0,
        trainer="bfloat16|float32",
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    load = AutoModelForCausalLM.from_pretrained
    trainer = load(options.model, dtype=getattr(torch, options.trainer)).eval()
    server = load(options.model, dtype=torch.float32).eval()
    layers = quantise_weights(server)
    if not layers:
        sys.exit(f"{options.model} has no weight that is sent in FP8.")
    for layer in layers:
        layer.register_forward_pre_hook(quantise_inputs)
    given = tokenizer(
        make_prompts(tokenizer, options.prompts),
        return_tensors="pt",
        padding=True,
        add_special_tokens=False,
    )
    torch.manual_seed(0)
    whole = server.generate(
        **given,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=options.tokens,
        min_new_tokens=options.tokens,
        pad_token_id=tokenizer.eos_token_id,
    )
    signs = torch.randint(0, 2, (trainer.config.vocab_size,)) * 2.0 - 1.0
    start, train, rollout = given["input_ids"].shape[1], [], []
    errors: dict[str, list[float]] = {"without": [], "truncated": []}
    for row, seen in zip(whole, given["attention_mask"], strict=True):
        ids = row[seen.shape[0] - int(seen.sum()) :][None]
        length = row.shape[0] - start
        log_probs = [
            model(ids).logits[0, -length - 1 : -1].float().log_softmax(-1)
            for model in (trainer, server)
        ]
        for found, each in zip((train, rollout), log_probs, strict=True):
            found.append(each.gather(-1, row[-length:, None])[:, 0])
        own, other = (each.exp() for each in log_probs)
        ratio = (log_probs[0] - log_probs[1]).exp()
        for name, weights in (
            ("without", torch.ones_like(ratio)),
            ("truncated", truncate(ratio, options.upper)),
        ):
            errors[name] += gradient_error(own, other, weights, signs).tolist()
    a, b = torch.stack(train), torch.stack(rollout)
    mask = torch.ones_like(a, dtype=torch.bool)
    raw = importance_weights(a - b, mask, "token")
    cut = truncate(raw, options.upper)
    metrics = mismatch_metrics(a, b, mask)
    metrics |= weight_metrics(raw, cut, mask, "token", (None, options.upper))
    print(f"{a.numel()} tokens, trainer in {options.trainer}")
    print_row("mean |difference|", float((a - b).abs().mean()))
    print_row("largest", float((a - b).abs().max()))
    for name in (
        *("k3_kl", "chi2_token", "chi2_seq"),
        *("rollout_is_mean", "rollout_is_std", "rollout_is_eff_sample_size"),
        *("rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low"),
    ):
        print(f"{name:32}{float(metrics[name]):12.5f}")
    for name, found in errors.items():
        print(f"error of the gradient, {name:12}{statistics.median(found):10.4f}")


if __name__ == "__main__":
    main()
