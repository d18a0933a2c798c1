"""The learner: advantage, correction, GRPO loss, optimizer steps."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import warnings
from collections import defaultdict
from dataclasses import fields
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDictBase, lazy_stack
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import MCAdvantage
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from grpo_config import is_changed
from torchrl_sglang import (
    CorrectedGRPOLoss,
    OffPolicyCorrection,
    RolloutCorrectionConfig,
)
from torchrl_sglang.errors import ConfigurationError, NotFiniteError

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
REWARD = ("next", "reward")

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
        self.loss_module = CorrectedGRPOLoss(
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
        self.scheduler = make_scheduler(
            cfg, self.optimizer, batches * train.epochs * steps
        )
        self.skipped = 0
        self.check_weights()
        self._advantage = MCAdvantage(grpo_size=cfg.env.repeats)
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(train.dialog_turns_per_batch),
            sampler=SamplerWithoutReplacement(),
            batch_size=train.optim_batch_size,
        )

    def train(self, batch: TensorDictBase, policy_version: int) -> dict[str, float]:
        """Takes the optimizer steps of a batch.

        A step whose gradient is not finite is not taken: weights, optimizer and
        schedule stay as they were, and a warning says which responses it was to be of.

        Args:
            batch: whole groups, as a collector yields them.
            policy_version: of the trainer's weights.

        Returns:
            Metrics of the loss, means over the batch, and ``batch/untrained``: share of
            responses without a token to train on, as all are too old. A batch of such
            responses changes nothing.

        Raises:
            FloatingPointError: after more than ``optimizer.max_skipped_steps`` such
                steps in a row, or if the weights are not finite.
        """
        self._set_version(policy_version)
        rows = self._add_advantage(batch.select(*TRAINING_KEYS))
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
                for name, value in self._step(minibatch).items():
                    sums[name].append(value)
        self.buffer.empty()
        self.check_weights()
        means = {name: sum(values) / len(values) for name, values in sums.items()}
        return untrained | means

    def check_weights(self) -> None:
        """Refuses to go on with weights that are not finite.

        Raises:
            FloatingPointError: naming the first of them.
        """
        for name, parameter in self.model.named_parameters():
            if not parameter.isfinite().all():
                raise FloatingPointError(
                    f"The weight {name} is not finite any more. It was neither saved "
                    f"nor sent to servers: give train.resume=true, to go on with the "
                    f"last checkpoint, and a smaller optimizer.lr."
                )

    def _add_advantage(self, rows: TensorDictBase) -> TensorDictBase:
        """Adds the advantage of each response in its group."""
        # In float32, the mean of equal rewards is another number than they are.
        rows.set(REWARD, rows[REWARD].double())
        rows = self._advantage.inv(rows)
        return rows.set("advantage", rows["advantage"].float())

    def _step(self, minibatch: TensorDictBase) -> dict[str, float]:
        """Takes one optimizer step, or none; returns metrics."""
        try:
            metrics = self._add_gradient(minibatch)
        except NotFiniteError as error:
            return self._skip(minibatch, str(error))
        limit = self.cfg.optimizer.clip_grad_norm
        norm = clip_grad_norm_(self._parameters, math.inf if limit is None else limit)
        if not norm.isfinite():
            return self._skip(minibatch, f"The gradient's norm is {norm.item()}.")
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.skipped = 0
        return metrics | {
            "optim/grad_norm": norm.item(),
            "optim/lr": self.scheduler.get_last_lr()[0],
            "optim/skipped": 0.0,
        }

    def _add_gradient(self, minibatch: TensorDictBase) -> dict[str, float]:
        """Adds the gradient of a minibatch, in parts; returns metrics."""
        # Texts are for the advantage alone.
        rows = minibatch.exclude("query").to(self.device)
        if self._correct is not None:
            rows = self._correct(rows)
        with self._autocast():
            output = self.loss_module.accumulate(rows.split(self._micro_batch))
        losses = [getattr(output, f"loss_{name}") for name in LOSSES]
        found = {name: getattr(output, name) for name in METRICS}
        metrics = {f"loss/{k}": v.item() for k, v in found.items() if v is not None}
        total = sum(each.item() for each in losses if each is not None)
        return {"loss/total": total, **metrics, **self._correction_metrics()}

    def _skip(self, minibatch: TensorDictBase, reason: str) -> dict[str, float]:
        """Takes no step, and says why; too many of these end the run."""
        self.optimizer.zero_grad()
        self.skipped += 1
        limit = self.cfg.optimizer.max_skipped_steps
        message = f"No optimizer step: {reason} {describe_rows(minibatch)}"
        if self.skipped > limit:
            raise FloatingPointError(
                f"{message} These were {self.skipped} steps in a row, more than "
                f"optimizer.max_skipped_steps={limit}; the weights and the checkpoints "
                f"are those before them."
            )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return {"optim/skipped": 1.0}

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
        # The state's values are those of the run that saved it; this run's count.
        given = [{**group, "params": None} for group in self.optimizer.param_groups]
        rates = self.scheduler.base_lrs
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict({**state["scheduler"], "base_lrs": rates})
        for group, values in zip(self.optimizer.param_groups, given, strict=True):
            group.update(values | {"params": group["params"]})
        set_learning_rates(self.scheduler)


def describe_rows(rows: TensorDictBase) -> str:
    """Says which responses a step was to be made of, those with bad numbers first.

    Args:
        rows: with prompts and rewards.
    """
    said = [
        (math.isfinite(reward), f"{query!r} (reward {reward:g})")
        for query, reward in zip(
            rows["query"], rows[REWARD].flatten().tolist(), strict=True
        )
    ]
    # Of a group, once; not finite ones first.
    texts = list(dict.fromkeys(text for _, text in sorted(said, key=lambda x: x[0])))
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return f"It was to train on {len(rows)} responses to {', '.join(texts[:5])}{more}."


def set_learning_rates(scheduler: LambdaLR) -> None:
    """Sets the learning rates that the schedule has for its current step."""
    groups = scheduler.optimizer.param_groups
    pairs = zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, base, factor in pairs:
        group["lr"] = base * factor(scheduler.last_epoch)
        group["initial_lr"] = base
    scheduler._last_lr = [group["lr"] for group in groups]


def make_scheduler(
    cfg: DictConfig, optimizer: torch.optim.Optimizer, steps: int
) -> LambdaLR:
    """Returns the schedule of transformers that the configuration names.

    Args:
        cfg: the configuration.
        optimizer: whose learning rate it sets.
        steps: of the whole run.

    Raises:
        ConfigurationError: if there is none of this name, or it needs more than the
            numbers of steps.
    """
    name = cfg.optimizer.scheduler
    try:
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=cfg.optimizer.warmup_steps,
            num_training_steps=steps,
        )
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"optimizer.scheduler={name!r} is no schedule for this recipe: {error} "
            f"Give constant_with_warmup, linear, cosine, ..."
        ) from error
    if not isinstance(scheduler, LambdaLR):
        raise ConfigurationError(
            f"optimizer.scheduler={name!r} needs a metric in each step; give "
            f"constant_with_warmup, linear, cosine, ..."
        )
    return scheduler


def check_learner(cfg: DictConfig) -> None:
    """Checks what the learner is made of, before servers are started for it.

    Raises:
        ConfigurationError: as the functions that make it.
    """
    make_correction(cfg.train.correction)
    optimizer = make_optimizer(cfg, [torch.nn.Parameter(torch.zeros(1))])
    make_scheduler(cfg, optimizer, 1)


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
