"""Off-policy training that collapses without correction and learns with it.

A small policy learns to count: after each token comes the next one. Three things that
make reinforcement learning of language models off-policy are forced upon it:

- staleness: the engine samples with weights that are many updates old;
- mismatch: the engine's logits differ from the trainer's for the same weights;
- a stuck server: half of the responses come from one that never takes new weights.

The advantage is the reward, from -1 to 1, and most tokens are wrong at first. On-policy
this is fine: a constant that is added to the advantage does not change the expected
gradient. Off-policy it does: a negative one moves the policy away from everything that
the engine writes, right or wrong. Importance weights restore what holds on-policy.

Methods differ in the correction alone. The figure and the numbers of the documentation
are those of (less than a minute on one CPU core):

    python examples/off_policy/train.py --output docs/source/images/off_policy.png
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from torchrl.modules import LLMMaskedCategorical

from torchrl_sglang import (
    CorrectedGRPOLoss,
    OffPolicyCorrection,
    RolloutCorrectionConfig,
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How far the engine is from the trainer's policy."""

    staleness: int = 0
    """Updates between the engine's weights and the trainer's."""
    noise: float = 0.0
    """Standard deviation of the noise of the engine's logits."""
    stuck: float = 0.0
    """Share of the responses from a server that keeps its first weights."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The task and its training."""

    seed: int = 0
    runs: int = 5
    """Independent runs; they have a batch together, and no weights in common."""
    steps: int = 200
    vocabulary: int = 8
    length: int = 6
    """Tokens of a response, after a prompt of one token."""
    prompts: int = 8
    """Prompts of a run in each batch."""
    group_size: int = 8
    """Responses to each prompt."""
    hidden: int = 32
    learning_rate: float = 1e-2
    baseline: str = "none"
    """What is subtracted from the reward: "none", or the mean of the "group"."""
    evaluate_every: int = 10


ON_POLICY = "on-policy"
SETTINGS = {
    ON_POLICY: Setting(),
    "32 updates old": Setting(staleness=32),
    "noise of the logits: 4": Setting(noise=4.0),
    "one of two servers stuck": Setting(stuck=0.5),
}

METHODS: dict[str, RolloutCorrectionConfig | None] = {
    "not corrected": RolloutCorrectionConfig.preset("disabled"),
    "GRPOLoss alone": None,
    "sequence masking": RolloutCorrectionConfig(
        rollout_is=None, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"
    ),
    "IcePop": RolloutCorrectionConfig.preset("decoupled_token_icepop"),
    "token TIS": RolloutCorrectionConfig.preset("decoupled_token_is"),
}
"""Label -> correction; None gives the loss the batch as the engine made it."""

COLORS = ("tab:red", "tab:orange", "tab:purple", "tab:blue", "tab:green")


class Policy(nn.Module):
    """Logits of the next token from the prompt, the position and the last token.

    The policies of all runs: the first rows of a batch are of the first run, and so on.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.in_keys = [("tokens", "full")]
        self.runs, self.length = config.runs, config.length
        self.vocabulary, hidden = config.vocabulary, config.hidden
        sizes = (config.vocabulary, config.length, config.vocabulary)
        scale = 1 / math.sqrt(len(sizes))
        self.embeddings = nn.ParameterList(
            scale * torch.randn(config.runs * size, hidden) for size in sizes
        )
        head = 0.1 * torch.randn(config.runs, hidden, config.vocabulary)
        self.head = nn.Parameter(head)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns logits, ``(rows, tokens, vocabulary)``.

        Args:
            inputs: prompt, position and last token, ``(rows, tokens)`` each.
        """
        rows, tokens = inputs[-1].shape
        run = torch.arange(self.runs).repeat_interleave(rows // self.runs).unsqueeze(-1)
        hidden = torch.zeros(())
        for table, value in zip(self.embeddings, inputs, strict=True):
            first = run * (len(table) // self.runs)
            hidden = hidden + embedding(first + value, table)
        hidden = hidden.tanh().view(self.runs, -1, self.head.shape[1])
        return (hidden @ self.head).view(rows, tokens, -1)

    def get_dist(self, tensordict: TensorDictBase) -> LLMMaskedCategorical:
        """Returns the distribution of each token, as TorchRL's losses ask for it."""
        full = tensordict["tokens", "full"]
        logits = self(full[:, :1], torch.arange(self.length), full[:, :-1])
        # The prompt is one token, and nothing comes before it.
        return LLMMaskedCategorical(
            logits=pad(logits, (0, 0, 1, 0)),
            mask=tensordict["masks", "all_assistant_mask"],
        )

    _get_rlhf_dist = get_dist


class Engine:
    """Samples with old weights, other numerics, and a server that is stuck."""

    def __init__(self, policy: Policy, setting: Setting) -> None:
        self.setting = setting
        self.first = deepcopy(policy)
        self.weights = deque([self.first], maxlen=setting.staleness + 1)

    def update(self, policy: Policy) -> None:
        """Takes weights, which are used ``staleness`` updates later."""
        self.weights.append(deepcopy(policy))

    @torch.no_grad()
    def generate(self, prompts: Tensor) -> TensorDict:
        """Returns responses with the log-probs that they were sampled with."""
        prompts = prompts.unsqueeze(-1)
        stuck = torch.rand(prompts.shape) < self.setting.stuck
        tokens, log_probs = [prompts], []
        for position in torch.arange(self.first.length):
            inputs = (prompts, position, tokens[-1])
            logits = self.weights[0](*inputs)
            if self.setting.stuck:
                logits = torch.where(stuck.unsqueeze(-1), self.first(*inputs), logits)
            logits = logits + self.setting.noise * torch.randn_like(logits)
            log_prob = logits.squeeze(1).log_softmax(-1)
            tokens.append(log_prob.exp().multinomial(1))
            log_probs.append(log_prob.gather(-1, tokens[-1]))
        # The log-prob of the prompt is unknown.
        known = pad(torch.cat(log_probs, -1), (1, 0), value=torch.nan)
        columns = {
            "tokens": {"full": torch.cat(tokens, -1)},
            "masks": {"all_assistant_mask": known.isfinite()},
            "log_probs": {"full": known},
        }
        return TensorDict(columns, batch_size=len(prompts))


def right_share(full: Tensor, vocabulary: int) -> Tensor:
    """Returns the share of the tokens of each response that are right."""
    return (full[:, 1:] == (full[:, :-1] + 1) % vocabulary).float().mean(-1)


def evaluate(policy: Policy) -> Tensor:
    """Returns the share of right tokens that the trainer writes, for each run."""
    prompts = torch.arange(policy.vocabulary).repeat(policy.runs * 8)
    batch = Engine(policy, Setting()).generate(prompts)
    share = right_share(batch["tokens", "full"], policy.vocabulary)
    return share.view(policy.runs, -1).mean(-1)


def sample(engine: Engine, config: Config) -> TensorDict:
    """Returns a batch with its advantage."""
    prompts = torch.randint(config.vocabulary, (config.runs * config.prompts,))
    batch = engine.generate(prompts.repeat_interleave(config.group_size))
    reward = 2 * right_share(batch["tokens", "full"], config.vocabulary) - 1
    if config.baseline == "group":
        groups = reward.view(-1, config.group_size)
        reward = (groups - groups.mean(-1, keepdim=True)).flatten()
    batch["advantage"] = reward.view(-1, 1, 1)
    return batch


def train(
    config: Config, setting: Setting, correction: RolloutCorrectionConfig | None
) -> Iterator[tuple[int, Tensor]]:
    """Trains with one correction, or none.

    Args:
        config: the task and its training.
        setting: what is forced upon it.
        correction: what the batch passes through before the loss, if anything.

    Yields:
        Step, and share of right tokens for each run.
    """
    torch.manual_seed(config.seed)
    policy = Policy(config)
    engine = Engine(policy, setting)
    loss = CorrectedGRPOLoss(policy, masking_strategy="rlhf", entropy_bonus=False)
    correct = None
    if correction is not None:
        correct = OffPolicyCorrection(
            correction, actor_network=policy, masking_strategy="rlhf"
        )
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    yield 0, evaluate(policy)
    for step in range(1, config.steps + 1):
        batch = sample(engine, config)
        loss(batch if correct is None else correct(batch)).loss_objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.update(policy)
        if step % config.evaluate_every == 0:
            yield step, evaluate(policy)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one method has reached in one setting."""

    steps: list[int]
    shares: Tensor
    """Share of right tokens, ``(steps, runs)``."""

    def summary(self) -> str:
        """Returns the mean over the runs and their range, at the end."""
        last = self.shares[-1]
        return f"{last.mean():.2f} ({last.min():.2f} to {last.max():.2f})"


Curves = dict[str, dict[str, Curve]]
"""Setting -> method -> curve."""


def compare(config: Config) -> Curves:
    """Trains in every setting with every method; prints and returns the curves."""
    curves: Curves = {}
    for label, setting in SETTINGS.items():
        print(f"{label}:")
        for method, correction in METHODS.items():
            if label == ON_POLICY and method != "not corrected":
                continue
            steps, shares = zip(*train(config, setting, correction), strict=True)
            curve = Curve(steps=list(steps), shares=torch.stack(shares))
            curves.setdefault(label, {})[method] = curve
            print(f"  {method:17} {curve.summary()}", flush=True)
    return curves


def plot(curves: Curves, path: Path) -> Path:
    """Plots the mean of the runs and their range, a panel for each setting."""
    (reference,) = curves[ON_POLICY].values()
    panels = {label: runs for label, runs in curves.items() if label != ON_POLICY}
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, (label, methods) in zip(axes, panels.items(), strict=True):
        draw(panel, reference, color="black", linestyle=":", label=ON_POLICY)
        for color, (method, curve) in zip(COLORS, methods.items(), strict=True):
            draw(panel, curve, color=color, label=method)
        panel.set(xlabel="update", ylim=(0, 1.02), title=label)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("share of right tokens")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=100)
    return path


def draw(panel: Axes, curve: Curve, **style: str) -> None:
    """Draws the mean of a curve's runs, and their range as a band."""
    low, high = curve.shares.aminmax(dim=-1)
    panel.fill_between(curve.steps, low, high, color=style["color"], alpha=0.15)
    panel.plot(curve.steps, curve.shares.mean(-1), **style)


def main() -> None:
    """Compares the methods and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("off_policy.png"))
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--learning-rate", type=float, default=Config.learning_rate)
    parser.add_argument("--baseline", choices=["none", "group"], default="none")
    arguments = vars(parser.parse_args())
    output = arguments.pop("output")
    torch.set_num_threads(1)
    print("Written:", plot(compare(Config(**arguments)), output))


if __name__ == "__main__":
    main()
