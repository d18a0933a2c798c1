"""The learner: advantage, correction, GRPO loss, optimizer steps."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDictBase, lazy_stack
from torch.nn.utils import clip_grad_norm_
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import MCAdvantage
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from grpo_config import is_changed
from torchrl_sglang import GRPOLoss, OffPolicyCorrection, RolloutCorrectionConfig
from torchrl_sglang.errors import ConfigurationError

TRAINING_KEYS = (
    "query",
    "tokens",
    "masks",
    "log_probs",
    ("next", "reward"),
    ("next", "done"),
    ("next", "policy_version"),
)
"""What advantage, correction and loss read of a batch."""

TRAIN_LOG_PROBS = "train_log_probs"
REF_LOG_PROBS = ("next", "ref_log_probs")
VERSION_KEY = ("next", "policy_version")

LOSSES = ("objective", "entropy", "kl_to_ref", "kl_to_inference")
METRICS = ("clip_fraction", "kl_approx", "ESS", "entropy", "kl_to_ref")


def make_correction(given: Any) -> RolloutCorrectionConfig | None:
    """Returns the off-policy correction of a preset's name, or of arguments.

    Raises:
        ConfigurationError: if there is no such preset or argument.
    """
    if given is None:
        return None
    if isinstance(given, str):
        # The transform knows the presets.
        return OffPolicyCorrection(given).config
    known = [field.name for field in fields(RolloutCorrectionConfig)]
    arguments = OmegaConf.to_container(given, resolve=True)
    for name in arguments:
        if name not in known:
            raise ConfigurationError(
                f"train.correction has no argument {name!r}; it has {', '.join(known)}."
            )
    return RolloutCorrectionConfig(**arguments)


class Learner:
    """Trains a model with GRPO on batches of whole groups.

    Args:
        cfg: the configuration.
        model: trained in place, where its weights are.
        tokenizer: its tokenizer.
        reference: what the divergence is to; by default the model without its adapter.
    """

    def __init__(
        self,
        cfg: DictConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        reference: PreTrainedModel | None = None,
    ) -> None:
        train = cfg.train
        self.cfg = cfg
        self.model = model
        self.device = next(model.parameters()).device
        self._reference = reference
        self._micro_batch = train.optim_batch_size // train.gradient_accumulation_steps
        self._tokenizer = tokenizer
        self.actor = self._wrap(model, "log_probs")
        correction = make_correction(train.correction)
        # Only an old policy that is recomputed needs a pass before the loss.
        recomputes = correction is not None and not (
            correction.bypass_mode or correction.proximal == "interpolated"
        )
        self._correct = (
            OffPolicyCorrection(correction, version_key=VERSION_KEY)
            if recomputes
            else None
        )
        self.loss_module = GRPOLoss(
            self.actor,
            clip_epsilon=train.clip_epsilon,
            entropy_bonus=train.entropy_coeff > 0,
            entropy_coeff=train.entropy_coeff,
            kl_to_inference_coeff=train.kl_to_inference_coeff or None,
            kl_to_ref_coeff=train.kl_to_ref_coeff if train.use_kl_to_ref else None,
            correction=None if recomputes else correction,
            version_key=VERSION_KEY,
            device=self.device,
        )
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self.optimizer = make_optimizer(cfg, self._parameters)
        batches = math.ceil(train.total_dialog_turns / train.dialog_turns_per_batch)
        steps = train.dialog_turns_per_batch // train.optim_batch_size
        self.scheduler = get_scheduler(
            cfg.optimizer.scheduler,
            self.optimizer,
            num_warmup_steps=cfg.optimizer.warmup_steps,
            num_training_steps=batches * train.epochs * steps,
        )
        self._advantage = MCAdvantage(grpo_size=cfg.env.repeats)
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(train.dialog_turns_per_batch),
            sampler=SamplerWithoutReplacement(),
            batch_size=train.optim_batch_size,
        )

    def train(self, batch: TensorDictBase, policy_version: int) -> dict[str, float]:
        """Takes the optimizer steps of a batch.

        Args:
            batch: whole groups, as a collector yields them.
            policy_version: of the trainer's weights.

        Returns:
            Metrics of the loss, means over the batch, and ``batch/untrained``: share of
            responses without a token to train on, as all are too old. A batch of such
            responses changes nothing.
        """
        self._set_version(policy_version)
        rows = self._advantage.inv(batch.select(*TRAINING_KEYS))
        log_probs = rows.get(("log_probs", "response"), as_list=True)
        known = [i for i, each in enumerate(log_probs) if each.isfinite().any()]
        untrained = {"batch/untrained": 1 - len(known) / len(rows)}
        if not known:
            return untrained
        rows = rows[known]
        self._add_log_probs(rows)
        self.buffer.extend(rows)
        sums: dict[str, list[float]] = defaultdict(list)
        for _ in range(self.cfg.train.epochs):
            for minibatch in self.buffer:
                for name, value in self._step(minibatch):
                    sums[name].append(value)
        self.buffer.empty()
        means = {name: sum(values) / len(values) for name, values in sums.items()}
        return untrained | means

    def _step(self, minibatch: TensorDictBase) -> Iterator[tuple[str, float]]:
        """Takes one optimizer step; yields metrics, some of them several times."""
        parts = minibatch.split(self._micro_batch)
        for part in parts:
            # Texts are for the advantage alone.
            rows = part.exclude("query").to(self.device)
            if self._correct is not None:
                rows = self._correct(rows)
            with self._autocast():
                output = self.loss_module(rows)
                losses = [getattr(output, f"loss_{name}") for name in LOSSES]
                loss = sum(each for each in losses if each is not None)
            (loss * (len(part) / len(minibatch))).backward()
            yield "loss/total", loss.item()
            for name in METRICS:
                value = getattr(output, name)
                if value is not None:
                    yield f"loss/{name}", value.item()
            yield from self._correction_metrics().items()
        limit = self.cfg.optimizer.clip_grad_norm
        norm = clip_grad_norm_(self._parameters, math.inf if limit is None else limit)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        yield "optim/grad_norm", norm.item()
        yield "optim/lr", self.scheduler.get_last_lr()[0]

    @torch.no_grad()
    def _add_log_probs(self, rows: TensorDictBase) -> None:
        """Adds the log-probs of other policies that correction and loss read."""
        if self._correct is not None:
            scorer = self._wrap(self.model, TRAIN_LOG_PROBS)
            rows.set(TRAIN_LOG_PROBS, self._score(scorer, TRAIN_LOG_PROBS, rows))
        if self.cfg.train.use_kl_to_ref:
            reference = self._reference
            adapter: Any = contextlib.nullcontext()
            if reference is None:
                reference, adapter = self.model, self.model.disable_adapter()
            scorer = self._wrap(reference, "ref")
            with adapter:
                rows.set(REF_LOG_PROBS, self._score(scorer, "ref", rows))

    def _score(
        self, scorer: TransformersWrapper, key: str, rows: TensorDictBase
    ) -> TensorDictBase:
        """Returns log-probs of all rows, computed in parts."""
        scored: list[TensorDictBase] = []
        for part in rows.split(self._micro_batch):
            with self._autocast():
                result = scorer(part.select("tokens", "masks").to(self.device))
            full = result.get((key, "full"), as_list=True)
            scored += [part[0].empty().set("full", each.cpu()) for each in full]
        return lazy_stack(scored)

    def _wrap(self, model: PreTrainedModel, log_probs_key: str) -> TransformersWrapper:
        # The trainer scores the very tokens that the engine wrote.
        return TransformersWrapper(
            model,
            tokenizer=self._tokenizer,
            input_mode="tokens",
            generate=False,
            return_log_probs=True,
            log_probs_key=log_probs_key,
        )

    def _autocast(self) -> Any:
        return torch.autocast(
            self.device.type,
            dtype=torch.bfloat16,
            enabled=self.cfg.train.mixed_precision,
        )

    def _correction_metrics(self) -> dict[str, float]:
        if self._correct is not None:
            return self._correct.metrics
        return self.loss_module.correction_metrics

    def _set_version(self, version: int) -> None:
        """Tells what corrects how new the trainer's weights are."""
        self.loss_module.consumer_version = version
        if self._correct is not None:
            self._correct.consumer_version = version

    def state_dict(self) -> dict[str, Any]:
        """Returns what brings the learner back: trained weights and optimizer."""
        trained = {
            name: parameter.detach().cpu()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        return {
            "model": trained,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state was saved."""
        parameters = dict(self.model.named_parameters())
        for name, value in state["model"].items():
            parameters[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def make_optimizer(
    cfg: DictConfig, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Returns the optimizer of torch that the configuration names.

    Raises:
        ConfigurationError: if there is none of this name, or it has no such argument.
    """
    kind = getattr(torch.optim, cfg.optimizer.name, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        names = {name.lower(): name for name in vars(torch.optim) if name[0].isupper()}
        near = difflib.get_close_matches(cfg.optimizer.name.lower(), names, n=1)
        hint = f"did you mean {names[near[0]]!r}?" if near else "give AdamW, Adam, ..."
        raise ConfigurationError(
            f"optimizer.name={cfg.optimizer.name!r} is no optimizer of torch.optim; "
            f"{hint}"
        )
    known = inspect.signature(kind).parameters
    arguments = {name: cfg.optimizer[name] for name in ("lr", "eps", "weight_decay")}
    for name in arguments.keys() - known.keys():
        value = arguments.pop(name)
        if is_changed(cfg, f"optimizer.{name}"):
            raise ConfigurationError(
                f"optimizer.name={cfg.optimizer.name} has no {name}; leave "
                f"optimizer.{name}={value} out."
            )
    return kind(parameters, **arguments)
