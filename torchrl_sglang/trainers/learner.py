"""Learner: the optimizer steps of a batch, on one rank or several."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LRScheduler
from torchrl.objectives.llm import GRPOLoss
from torchrl.objectives.llm import SFTLoss as TorchRLSFTLoss

from torchrl_sglang.errors import ConfigurationError, NotFiniteError
from torchrl_sglang.objectives.advantages import REWARD
from torchrl_sglang.objectives.columns import read, read_mask, row_lengths
from torchrl_sglang.objectives.correct import NOT_SCORED
from torchrl_sglang.objectives.distillation import (
    TEACHER,
    TEACHER_LOG_PROBS,
    refuse_recomputed,
)
from torchrl_sglang.objectives.losses import CorrectedGRPOLoss
from torchrl_sglang.objectives.packing import can_share, packed_terms, prepare_packing
from torchrl_sglang.objectives.parts import LossRanks
from torchrl_sglang.objectives.routing import EXPERTS, replay_of, replaying
from torchrl_sglang.objectives.sampling import padded_terms
from torchrl_sglang.objectives.support import SAMPLING_KEYS, Drawn, warn_of_sampling
from torchrl_sglang.objectives.transform import OffPolicyCorrection
from torchrl_sglang.objectives.tree import TREES_PAY, cut_tree
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.requests.token_columns import (
    ASSISTANT_MASK,
    ATTENTION_MASK,
    POLICY_VERSIONS,
    TOKENS,
)
from torchrl_sglang.support.checks import check_count, check_positive, refuse_unknown
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.trainers.clipping import clip_gradients
from torchrl_sglang.trainers.models import scorer
from torchrl_sglang.trainers.optimizers import ScheduleStart, check_steps_alone
from torchrl_sglang.trainers.passes import (
    count_computed,
    count_tokens,
    cut_by_tokens,
    needs_no_pass,
    sort_rows,
)
from torchrl_sglang.trainers.rank_scores import RankScores
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.trainers.report import describe_rows
from torchrl_sglang.trainers.teacher import LOG_PROBS, Teacher

TRAINING_KEYS = (
    "tokens",
    "masks",
    "log_probs",
    "advantage",
    POLICY_VERSIONS,
    REWARD,
    EXPERTS,
    TEACHER,
    *SAMPLING_KEYS,
)
"""Columns of a batch that training reads beside the prompts, where it has them."""

TRAIN_LOG_PROBS = "train_log_probs"
REF_LOG_PROBS = ("next", "ref_log_probs")

LOSSES = ("objective", "entropy", "kl_to_ref", "kl_to_inference", "distillation")
METRICS = (
    *("clip_fraction", "kl_approx", "ESS", "entropy", "kl_to_ref"),
    *("distillation", "distillation_missed", "distillation_missed_nats"),
    "distillation_variance",
)

MAX_SKIPPED_STEPS = 5
"""Steps in a row without a finite gradient that do not end a run."""


class Learner:
    """Takes the optimizer steps of a batch of responses with advantages.

    Responses are cut into passes by their *tokens*, so that memory is bounded whatever
    their lengths; the gradient is that of all of them together, over all ranks. A loss
    that packs (``CorrectedGRPOLoss(packing=...)``) has no padding in these passes; with
    ``packing="tree"``, tokens that responses share count once. With ``"auto"`` they do
    in batches with at least 1.5 times as many tokens as distinct ones, if a batch is
    one minibatch and the model has no dropout.

    Args:
        loss: a :class:`.CorrectedGRPOLoss` or one of its kind, around the actor; or a
            :class:`.SFTLoss`.
        optimizer: of the model's parameters, or some of them: those are trained, and
            the norm of the gradient is theirs.
        schedule: of its learning rate, which depends on the number of optimizer steps
            alone: it is stepped once for each of them, and a run that goes on takes
            its steps again.
        correct: applied to each minibatch, with the trainer's log-probs before the
            steps; None where the loss has the correction itself. Defaults to None.
        reference: what the loss's divergence is to: a model, or ``"adapter"`` for the
            trained one without its adapter. Defaults to None: no divergence.
        teacher (Teacher, optional): scores each batch for the loss's ``distillation``.
            By default the batch has the teacher's columns already.
        minibatches: optimizer steps of a pass over a batch. Defaults to 1.
        epochs: passes over a batch. Defaults to 1.
        max_tokens_per_pass: most tokens of a forward and backward pass, with padding
            where there is some; a longer response has a pass of its own. Defaults to
            16,384.
        clip_grad_norm: largest norm of a gradient; None for no limit. Defaults to 1.
        max_skipped_steps: as in :meth:`train`. Defaults to 5.
        autocast: compute passes in bfloat16. Defaults to False.
        ranks: of the trainer. Defaults to this process alone.
        recorder (RunRecorder, optional): records the trainer's log-probs of the tokens
            that this rank trains on.
        query_key: column of the prompts, which messages name. Defaults to ``"query"``.

    Examples:
        >>> loss = CorrectedGRPOLoss(actor, clip_epsilon=0.2)  # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(model.parameters())  # doctest: +SKIP
        >>> learner = Learner(loss, optimizer)  # doctest: +SKIP
        >>> advantage = GroupAdvantage(8)  # doctest: +SKIP
        >>> for batch in collector:  # doctest: +SKIP
        ...     learner.train(advantage(batch), collector.policy_version)
        ...     collector.update_policy_weights_()
    """

    @refuse_unknown
    def __init__(
        self,
        loss: CorrectedGRPOLoss,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler | None = None,
        *,
        correct: OffPolicyCorrection | None = None,
        reference: Any = None,
        teacher: Teacher | None = None,
        minibatches: int = 1,
        epochs: int = 1,
        max_tokens_per_pass: int = 16_384,
        clip_grad_norm: float | None = 1.0,
        max_skipped_steps: int = MAX_SKIPPED_STEPS,
        autocast: bool = False,
        ranks: TrainerRanks | None = None,
        recorder: RunRecorder | None = None,
        query_key: str = "query",
    ) -> None:
        for name, count, minimum in (
            ("minibatches", minibatches, 1),
            ("epochs", epochs, 1),
            ("max_tokens_per_pass", max_tokens_per_pass, 1),
            ("max_skipped_steps", max_skipped_steps, 0),
        ):
            check_count(name, count, least=minimum)
        if clip_grad_norm is not None:
            check_positive("clip_grad_norm", clip_grad_norm)
        self._reads_rollouts = getattr(loss, "reads_rollouts", True)
        _check_loss(loss, correct=correct, reference=reference, teacher=teacher)
        self.loss = loss
        self.actor = loss.actor_network
        self.model = self.actor.model
        self.optimizer = optimizer
        self.schedule = schedule
        self.ranks = ranks or TrainerRanks()
        self.recorder: RunRecorder | RankScores | None = recorder
        self.on_taught: Callable[[], object] | None = None
        """Called when a teacher has scored a batch and sleeps again."""
        self.query_key = query_key
        self.skipped = 0
        self.steps = 0
        self._correct = correct
        self._reference = reference
        self._teacher = _check_teacher(teacher, loss)
        self._minibatches = minibatches
        self._epochs = epochs
        self._max_tokens = max_tokens_per_pass
        self._clip = clip_grad_norm
        self._max_skipped = max_skipped_steps
        self._autocast_on = autocast
        self._packs = bool(getattr(loss, "packs", False))
        self._as_trees = getattr(loss, "packing", False) == "tree"
        self._has_told = False
        if getattr(loss, "packing", False) == "auto" and not self._packs:
            warnings.warn(
                f"Passes are padded, which takes time where lengths differ: "
                f"{loss.padded_because}. With packing=False this is not said.",
                RuntimeWarning,
                stacklevel=3,
            )
        if self._packs and isinstance(reference, nn.Module):
            # Refused here, not when the first batch was collected.
            prepare_packing(reference, loss.packing)
        self._chooses_trees = (
            self._packs
            and getattr(loss, "packing", False) == "auto"
            and minibatches == 1
            and all(
                can_share(model)
                for model in (self.model, reference)
                if isinstance(model, nn.Module)
            )
        )
        self._one_pass = minibatches == epochs == 1 and needs_no_pass(loss, correct)
        distillation = getattr(loss, "distillation", None)
        if correct is not None and distillation is not None and not self._one_pass:
            refuse_recomputed(distillation)
        self._device = next(self.model.parameters()).device
        self._start: ScheduleStart | None = None
        if schedule is not None:
            check_steps_alone(schedule)
        trained = set(self._trained)
        if not any(weight in trained for weight in self.model.parameters()):
            raise ConfigurationError(
                "No parameter of the model has requires_grad=True and is one of the "
                "optimizer's, so there is nothing to train; make the optimizer of the "
                "model's parameters, after adapters were added and ranks have shared "
                "it out."
            )

    @property
    def _trained(self) -> list[nn.Parameter]:
        """The parameters whose gradient is computed for the optimizer."""
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    @property
    def _ranks_in_step(self) -> LossRanks:
        """The ranks that go on together, or raise together; their wait is long."""
        return LossRanks(self.ranks.control or self.ranks.group, self.loss)

    def train(self, batch: TensorDictBase, policy_version: int = 0) -> dict[str, float]:
        """Takes the optimizer steps of a batch; all ranks call it, each with its share.

        A step whose gradient is not finite is not taken: weights, optimizer and
        schedule stay as they were, and a warning says which responses it was to be of.

        Args:
            batch: responses with ``"advantage"``; without, for an :class:`.SFTLoss`.
            policy_version: of the trainer's weights, as the collector counts them.
                Defaults to 0, for a loss without a bound on the age of tokens.

        Returns:
            Metrics of the responses of all ranks: means over the optimizer steps.
            ``train/unscored`` is the share of responses without a log-prob, which are
            not trained on: as those are whose tokens are all too old; for an
            :class:`.SFTLoss`, without a loss token. A batch of such responses alone
            changes nothing. ``train/flipped_experts``, where routing is
            replayed, is the share of choices of experts that routers would have made
            otherwise. ``train/tree_ratio``, where tokens that responses share are
            computed once, is the number of tokens over those that the model computed.

        Raises:
            ConfigurationError: if the batch has no ``"advantage"``, no tokens or no
                log-probs, for an :class:`.SFTLoss` no loss token, or a rank has no
                response to train on and others have. Raised on all ranks, as is each
                error of a rank.
            NotFiniteError: after more than ``max_skipped_steps`` such steps in a row,
                or if the weights are not finite.
        """
        self._mark_start()
        batch = self.score(batch)
        rows = self._ranks_in_step.together(lambda: self._select(batch))
        scored = self._ranks_in_step.together(
            lambda: [self._is_trained(row) for row in rows.unbind(0)]
        )
        counts = self.ranks.gather((sum(scored), len(scored)))
        number, total = map(sum, zip(*counts, strict=True))
        metrics = {"train/unscored": 1 - number / total}
        if not number:
            self._ranks_in_step.together(lambda: self._check_untrained(rows))
            return metrics
        if not all(of_rank for of_rank, _ in counts):
            raise ConfigurationError(
                "A rank of the trainer has no response to train on, and others "
                "have; collect larger batches, or train on fewer ranks."
            )
        if not all(scored):
            chosen = [row for row, has in zip(rows, scored, strict=True) if has]
            rows = LazyStackedTensorDict(*chosen)
        self.loss.consumer_version = policy_version
        if self._correct is not None:
            self._correct.consumer_version = policy_version
            self._correct.process_group = self.ranks.group
        if (replay := replay_of(self.model)) is not None:
            replay.reset()
        self._ranks_in_step.together(lambda: self._check_columns(rows))
        self._choose_trees(rows)
        self._add_log_probs(rows)
        sums: dict[str, list[float]] = defaultdict(list)
        for epoch in range(self._epochs):
            with self._recording(on=epoch == 0):
                for minibatch in self._cut(rows):
                    for name, value in self._step(minibatch).items():
                        sums[name].append(value)
        self._check_weights()
        if replay is not None:
            flipped, choices = map(
                sum, zip(*self.ranks.gather(replay.counts), strict=True)
            )
            metrics["train/flipped_experts"] = flipped / max(choices, 1.0)
        return metrics | {name: sum(v) / len(v) for name, v in sums.items()}

    def score(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns a batch with the columns of the teacher, if there is one.

        :meth:`train` does it otherwise. All ranks call it, each with its share.

        Raises:
            ConfigurationError: as :class:`.Teacher`; on all ranks, as each error.
        """
        teacher = self._teacher
        # A task's own column may have the name, too.
        if teacher is None or TEACHER_LOG_PROBS in batch.keys(True):
            return batch
        try:
            self.ranks.first(teacher.wake_up)
            return self._ranks_in_step.together(lambda: teacher(batch))
        finally:
            self.ranks.first(teacher.sleep)
            if self.on_taught is not None:
                self.on_taught()

    def _mark_start(self) -> None:
        """Keeps the state of a schedule before the first step."""
        if self._start is None:
            self._start = ScheduleStart.of(self.optimizer, self.schedule)

    @contextlib.contextmanager
    def _recording(self, *, on: bool) -> Iterator[None]:
        """Tells the recorder of the log-probs that the loss computes in the block."""
        if self.recorder is None or not on or not hasattr(self.loss, "on_scored"):
            yield
            return
        scored: list[tuple[TensorDictBase, torch.Tensor]] = []
        self.loss.on_scored = lambda rows, known: scored.append((rows, known))
        try:
            yield
        finally:
            self.loss.on_scored = None
        self.recorder.scored(scored)

    def _select(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns the columns of a batch that training reads."""
        present = batch.keys(True)
        if self._reads_rollouts and "advantage" not in present:
            raise ConfigurationError(
                "The batch has no 'advantage'; compute it first, for instance with "
                "GroupAdvantage(group_size)."
            )
        if TOKENS not in present:
            raise ConfigurationError(
                f"The batch has no {TOKENS!r}, which is what is trained on; collect it "
                f"with SGLangWrapper(...), all of whose rows have tokens."
            )
        if self._reads_rollouts and LOG_PROBS not in present:
            raise ConfigurationError(f"The batch lacks {LOG_PROBS!r}. {NOT_SCORED}")
        if not hasattr(self.loss, "sampling_of"):
            warn_of_sampling(batch)
        return batch.select(self.query_key, *TRAINING_KEYS, strict=False)

    def _is_trained(self, row: TensorDictBase) -> bool:
        """Returns whether a row has a token that the loss can be of."""
        if self._reads_rollouts:
            return bool(row[LOG_PROBS].isfinite().any())
        strategy, width = self.loss.masking_strategy, len(row[TOKENS])
        return bool(read_mask(row.unsqueeze(0), strategy, width)[:, 1:].any())

    def _check_untrained(self, rows: TensorDictBase) -> None:
        """Refuses rows of which none is trained on, unless all tokens are masked."""
        if not self._reads_rollouts:
            raise ConfigurationError(
                f"No row of the batch has a loss token of masking_strategy="
                f"{self.loss.masking_strategy!r}; check the masks of its tokens."
            )
        masks = [row.get(ASSISTANT_MASK, None) for row in rows.unbind(0)]
        if any(mask is not None and mask.any() for mask in masks):
            raise ConfigurationError(NOT_SCORED)

    def _check_columns(self, rows: TensorDictBase) -> None:
        """Refuses wrong rows of any rank before other ranks wait in a pass.

        Experts of another number of tokens are refused before trees are planned.
        """
        reads, replays = hasattr(self.loss, "sampling_of"), replay_of(self.model)
        if self.ranks.size == 1 and replays is None:
            return
        for row in rows.unbind(0):
            sampled = reads and any(key in row.keys() for key in SAMPLING_KEYS)
            if not (sampled or replays):
                continue
            one = row.unsqueeze(0)
            if sampled:
                self.loss.sampling_of(one)
            with replaying(self.model, one):
                pass

    def _cut(self, rows: TensorDictBase) -> Iterator[TensorDictBase]:
        """Yields minibatches in random order, as many on each rank."""
        count = self._minibatches
        while count > 1 and not self.ranks.all_true(len(rows) >= count):
            count -= 1
        order, numbers = torch.randperm(len(rows)).tolist(), list(range(count))
        if self._as_trees:
            # Rows with a common prefix are in one minibatch.
            order = [index for index, _ in self._sort(rows)]
            numbers = torch.randperm(count).tolist()
        for number in numbers:
            begin, end = (len(rows) * part // count for part in (number, number + 1))
            yield LazyStackedTensorDict(*(rows[i] for i in order[begin:end]))

    def _step(self, minibatch: TensorDictBase) -> dict[str, float]:
        """Takes one optimizer step, or none; returns metrics."""
        try:
            metrics = self._add_gradient(minibatch)
            size = clip_gradients(self._trained, self._clip)
            if not self.ranks.all_true(bool(size.isfinite())):
                raise NotFiniteError(f"The gradient's norm is {size.item()}.")
            self.optimizer.step()
        except NotFiniteError as error:
            return self._skip(minibatch, str(error))
        finally:
            self._clear_gradients()
        rate = float(self.optimizer.param_groups[0]["lr"])
        if self.schedule is not None:
            self.schedule.step()
        self.skipped = 0
        self.steps += 1
        return metrics | {
            "train/grad_norm": size.item(),
            "train/lr": rate,
            "train/skipped": 0.0,
        }

    def _clear_gradients(self) -> None:
        """Removes all gradients, also of parameters that no optimizer has."""
        self.optimizer.zero_grad()
        for parameter in self.loss.parameters():
            parameter.grad = None

    def _add_gradient(self, minibatch: TensorDictBase) -> dict[str, float]:
        """Adds the gradient of a minibatch, in passes; returns metrics."""
        # A loss of the user's may raise on one rank alone.
        ranks = self._ranks_in_step
        rows = ranks.together(lambda: self._corrected(minibatch))
        order = ranks.together(lambda: self._sort(rows)) if self._as_trees else []
        parts = self._cut_by_tokens(rows, packed=self._packs, order=order)
        passes = [LazyStackedTensorDict(*(rows[i] for i in part)) for part in parts]
        ratio = self._tree_ratio(rows, order, parts)
        output = ranks.together(lambda: self._accumulate(passes))
        losses = [getattr(output, f"loss_{name}", None) for name in LOSSES]
        total = sum(loss.sum().item() for loss in losses if loss is not None)
        metrics = {name: getattr(output, name, None) for name in METRICS}
        corrected = (
            self.loss.correction_metrics
            if self._correct is None or self._one_pass
            else self._correct.metrics
        )
        return {
            "train/loss": total,
            **{f"train/{k}": v.item() for k, v in metrics.items() if v is not None},
            **corrected,
            **ratio,
        }

    def _corrected(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Returns the columns of the loss, on the model's device."""
        rows = minibatch.exclude(self.query_key).to(self._device)
        if self._correct is None or self._one_pass:
            return rows
        corrected: TensorDictBase = self._correct(rows)
        return corrected

    def _accumulate(self, passes: list[TensorDictBase]) -> Any:
        """Adds the gradient of a minibatch; returns losses and metrics."""
        correcting: Any = contextlib.nullcontext()
        if self._one_pass:
            assert self._correct is not None
            correcting = self.loss.correcting(self._correct.config)
        with self._autocast(), correcting:
            return self.loss.accumulate(passes, process_group=self.ranks.group)

    def _cut_by_tokens(
        self,
        rows: TensorDictBase,
        *,
        packed: bool,
        order: Sequence[tuple[int, int]] = (),
    ) -> list[list[int]]:
        """Returns the rows of each pass, as many passes on each rank.

        Passes of a sharded model take all ranks, which wait for the longest one.
        ``order`` is the result of :meth:`_sort`, if it is known.
        """
        lengths, limit = [len(row[TOKENS]) for row in rows.unbind(0)], self._max_tokens
        if packed and self._as_trees:
            cut = partial(cut_tree, order or self._sort(rows), lengths, limit)
        else:
            cut = partial(cut_by_tokens, lengths, limit, packed=packed)
        parts = cut()
        count = max(self.ranks.gather(len(parts)))
        return cut(least=count) if count > len(parts) else parts

    def _sort(self, rows: TensorDictBase) -> list[tuple[int, int]]:
        return sort_rows(rows, by_experts=replay_of(self.model) is not None)

    def _choose_trees(self, rows: TensorDictBase) -> None:
        """Has passes compute shared prefixes once, if all ranks' rows share enough."""
        if not self._chooses_trees:
            return
        counts = self._ranks_in_step.together(
            lambda: count_tokens(rows, self._sort(rows))
        )
        total, distinct = map(sum, zip(*self.ranks.gather(counts), strict=True))
        self._as_trees = self.loss.trees = total >= TREES_PAY * distinct

    def _tree_ratio(
        self,
        rows: TensorDictBase,
        order: Sequence[tuple[int, int]],
        parts: Sequence[Sequence[int]],
    ) -> dict[str, float]:
        """Returns the tokens of passes over those that are computed, on all ranks.

        Says once if passes compute many tokens again that other passes have computed.
        """
        if not self._as_trees:
            return {}
        total, distinct = count_tokens(rows, order)
        lengths = [len(row[TOKENS]) for row in rows.unbind(0)]
        computed = count_computed(order, lengths, parts)
        if computed > 1.1 * distinct and not self._has_told:
            self._has_told = True
            torchrl_logger.info(
                f"Trees are cut: a step has {distinct} distinct tokens, and its passes "
                f"compute {computed}, since max_tokens_per_pass={self._max_tokens} "
                f"puts what shares a prefix into several passes."
            )
        counts = self.ranks.gather((total, computed))
        total, computed = map(sum, zip(*counts, strict=True))
        return {"train/tree_ratio": total / computed}

    def _skip(self, minibatch: TensorDictBase, reason: str) -> dict[str, float]:
        """Takes no step, and says why; too many of these end the run."""
        self.skipped += 1
        rows = describe_rows(minibatch, self.query_key)
        message = f"No optimizer step: {reason} {rows}"
        if self.skipped > self._max_skipped:
            raise NotFiniteError(
                f"{message} These were {self.skipped} steps in a row, more than "
                f"max_skipped_steps={self._max_skipped}; the weights are those before "
                f"them."
            )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return {"train/skipped": 1.0}

    def _check_weights(self) -> None:
        """Refuses to go on with weights that are not finite, on all ranks."""
        if wrong := self.find_not_finite():
            raise NotFiniteError(
                f"{wrong} is not finite any more. It was neither saved nor sent to "
                f"servers: go on with the last checkpoint, and a smaller learning rate."
            )

    @torch.no_grad()
    def find_not_finite(self, *, of_optimizer: bool = False) -> str:
        """Returns which trained weight is not finite, on any rank; ``""``: none.

        With ``of_optimizer``, the optimizer's state of each weight is checked, too.
        """
        tensors = {
            f"weight {name}": weight
            for name, weight in self.model.named_parameters()
            if weight.requires_grad
        }
        if of_optimizer:
            for name, weight in list(tensors.items()):
                for kind, state in self.optimizer.state.get(weight, {}).items():
                    if torch.is_tensor(state) and state.is_floating_point():
                        tensors[f"optimizer's {kind} of {name}"] = state
        parts = {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in tensors.items()
        }
        # One answer of the GPU for all of them; a rank can have nothing of some.
        filled = [part.detach() for part in parts.values() if part.numel()]
        size, wrong = get_total_norm(filled, math.inf), ""
        if not size.isfinite():
            names = (name for name, part in parts.items() if not part.isfinite().all())
            wrong = next(names, "")
        if self.ranks.all_true(not wrong):
            return ""
        return f"The {wrong or 'weight of another rank'}"

    @torch.no_grad()
    def _add_log_probs(self, rows: TensorDictBase) -> None:
        """Adds the log-probs of other policies that correction and loss read."""
        if self._correct is not None and not self._one_pass:
            self._score(self.model, TRAIN_LOG_PROBS, rows)
        if self._reference is None:
            return
        model, adapter = self._reference, contextlib.nullcontext()
        if model == "adapter":
            model, adapter = self.model, self.model.disable_adapter()
        with adapter:
            self._score(model, REF_LOG_PROBS, rows)

    def _score(self, model: Any, place: Any, rows: TensorDictBase) -> None:
        """Writes log-probs of all rows, computed in passes."""
        packed = self._packs and not prepare_packing(model, self.loss.packing)
        parts = self._cut_by_tokens(rows, packed=packed)
        ranks = LossRanks(self.ranks.group, self.loss)
        for part, counts in ranks.same_number(parts):
            chosen = [rows[index] for index in part]
            inputs = LazyStackedTensorDict(*chosen).select(
                "tokens", "masks", EXPERTS, *SAMPLING_KEYS, strict=False
            )

            def scored(inputs: TensorDictBase = inputs) -> Any:
                # A reference routes by itself.
                routing: Any = contextlib.nullcontext()
                if place == TRAIN_LOG_PROBS:
                    routing = replaying(self.model, inputs)
                with self._autocast(), routing:
                    return self._score_part(
                        model, inputs.to(self._device), packed=packed
                    )

            log_probs = self._ranks_in_step.together(scored)
            for row, values in zip(chosen, log_probs, strict=True):
                if counts:
                    row.set(place, row.empty().set("full", values.cpu()))
        if isinstance(model, FSDPModule):
            # After a pass without gradients its outermost parameters stay gathered,
            # and the passes that follow would make wrong gradients for them.
            model.reshard()

    def _sampling_of(self, inputs: TensorDictBase) -> Drawn | None:
        """Returns the distribution of the tokens, if the loss replays it."""
        sampling_of = getattr(self.loss, "sampling_of", None)
        return None if sampling_of is None else sampling_of(inputs)

    def _score_part(self, model: Any, inputs: TensorDictBase, *, packed: bool) -> Any:
        """Returns the log-probs of scored tokens, a tensor for each row."""
        tokens, real = _read_tokens(inputs, self.actor.tokenizer.pad_token_id)
        sampling = self._sampling_of(inputs)
        if packed:
            width = tokens.shape[1]
            mask = read_mask(inputs, self.loss.masking_strategy, width)
            if self._correct is not None:
                mask = mask | read_mask(inputs, self._correct.masking_strategy, width)
            terms = packed_terms(
                model, tokens, real, mask, sampling=sampling, tree=self._as_trees
            )
        else:
            # Nothing is before the first token of a sequence.
            mask = real & (real.cumsum(-1) > 1)
            actor = scorer(model, self.actor.tokenizer)
            terms = padded_terms(actor, tokens, real, mask, sampling=sampling)
        lengths, width = row_lengths(inputs, TOKENS), tokens.shape[1]
        assert lengths is not None
        pairs = zip(terms.log_prob, lengths.tolist(), strict=True)
        return [row[width - length :] for row, length in pairs]

    def _autocast(self) -> Any:
        return torch.autocast(
            self._device.type, dtype=torch.bfloat16, enabled=self._autocast_on
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns weights that are trained, and the optimizer; all ranks call it.

        Each has its own part. PyTorch's distributed checkpoint takes the learner
        itself, ``torch.distributed.checkpoint.save({"learner": learner})``, and
        ``load`` goes on with any number of ranks.
        """
        options = StateDictOptions(ignore_frozen_params=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        # Learning rate and other values come from the resumed run.
        groups: Any = optimizer["param_groups"]
        optimizer["param_groups"] = [{"params": group["params"]} for group in groups]
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state was saved; all ranks call it, each with its part.

        Learning rate and other values of the optimizer are this run's: those of a new
        run that has taken as many steps.
        """
        self._mark_start()
        assert self._start is not None
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False, ignore_frozen_params=True),
        )
        self.steps = state["steps"]
        self._start.advance(self.steps)


def _check_teacher(teacher: Teacher | None, loss: Any) -> Teacher | None:
    """Returns a teacher, if one is given, and refuses one of another loss."""
    if teacher is None:
        return None
    teacher.check_tokens(loss.actor_network.tokenizer)
    # A loss of the user's may read the columns by itself.
    if not hasattr(loss, "distillation"):
        return teacher
    scored, settings = teacher.distillation, loss.distillation
    if settings is None or (
        settings.compares_distributions
        and (settings.estimator, settings.k) != (scored.estimator, scored.k)
    ):
        raise ConfigurationError(
            f"The teacher scores batches for {scored}, and the loss has "
            f"distillation={settings}; give both the same Distillation."
        )
    return teacher


def _check_loss(loss: Any, **parts: Any) -> None:
    """Refuses a loss without sums over parts of a batch, and parts that it ignores."""
    if not callable(getattr(loss, "accumulate", None)):
        hint = ""
        if isinstance(loss, (GRPOLoss, TorchRLSFTLoss)):
            hint = (
                " TorchRL's losses have none: take CorrectedGRPOLoss or SFTLoss of "
                "torchrl_sglang."
            )
        raise ConfigurationError(
            f"loss={type(loss).__name__} has no accumulate(), which makes the "
            f"gradient of a batch from parts of it.{hint}"
        )
    for name, part in parts.items():
        if part is not None and not getattr(loss, "reads_rollouts", True):
            raise ConfigurationError(
                f"{name}={part!r:.200} is not read by {type(loss).__name__}; leave it "
                f"out, or take CorrectedGRPOLoss."
            )


def _read_tokens(rows: TensorDictBase, padding: int) -> tuple[Tensor, Tensor]:
    """Returns tokens padded on the left, and which of them are real."""
    tokens = read(rows, TOKENS, padding_value=padding)
    real = read(rows, ATTENTION_MASK, padding_value=False)
    assert tokens is not None
    if real is None:
        raise ConfigurationError(
            f"The batch has no {ATTENTION_MASK!r}, which says which of its tokens are "
            f"padding; collect it with SGLangWrapper(...), whose batches have masks."
        )
    return tokens, real.bool()
