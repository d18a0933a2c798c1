"""GRPO: a training run in one call, and its loop.

:meth:`GRPO.train` is the loop. It is short, and made of public parts, so that it can be
copied and changed: the engine, the policy, the collector, the :class:`.Learner` and the
weight-sync scheme are attributes of the run.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl import logger as torchrl_logger
from transformers import AutoTokenizer

from torchrl_sglang.backends.async_sglang import AsyncSGLang
from torchrl_sglang.backends.client.model_info import find_experts, load_model_config
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.launch.gpus import visible_devices
from torchrl_sglang.collectors.async_llm_collector import AsyncLLMCollector
from torchrl_sglang.collectors.shared_collector import SharedCollector
from torchrl_sglang.collectors.weight_sync import attach_weight_sync
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.objectives.advantages import GroupAdvantage, TrajectoryReturn
from torchrl_sglang.objectives.config import RolloutCorrectionConfig, as_config
from torchrl_sglang.objectives.packing import Packing, check_packing
from torchrl_sglang.objectives.routing import replay_routing
from torchrl_sglang.objectives.transform import MaskingStrategy, OffPolicyCorrection
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.requests.token_columns import (
    ROUTED_EXPERTS,
    check_columns,
    find_columns,
)
from torchrl_sglang.support.checks import check_flag, check_keywords
from torchrl_sglang.trainers.arguments import (
    check_collector,
    check_counts,
    check_dtype,
    check_gpus,
    check_placement,
    check_prompts,
    connect_arguments,
    count_steps,
    server_arguments,
)
from torchrl_sglang.trainers.checkpoints import (
    ROLLOUTS,
    Checkpoints,
    Resume,
    forget_later_steps,
    random_state,
    set_random_state,
)
from torchrl_sglang.trainers.deterministic import (
    check_repeatable,
    deterministic_algorithms,
)
from torchrl_sglang.trainers.learner import Learner
from torchrl_sglang.trainers.methods import find_method
from torchrl_sglang.trainers.models import load_model, save_model, scorer
from torchrl_sglang.trainers.optimizers import make_schedule, optimizer_of
from torchrl_sglang.trainers.ranks import TrainerRanks, find_trainer_ranks
from torchrl_sglang.trainers.report import (
    PhaseClock,
    Rollouts,
    describe,
    flatten,
    line_of,
    make_logger,
    sample_of,
    summarize,
    tell,
)
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

SAMPLING: Mapping[str, Any] = {"max_new_tokens": 512, "temperature": 1.0}
"""Sampling parameters, unless others are given."""

UNTOLD = ("self", "model", "prompts", "eval_prompts")
"""Arguments that a logger is not told of, as they may be large."""

GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0}
"""Sampling parameters of evaluation that differ from these."""


class GRPO:
    """A GRPO run: prompts and rewards in, a trained model in a folder out.

    Synchronous (``max_staleness=0``), colocated (the servers sleep on the trainer's
    GPUs while it trains) or asynchronous; all weights or a LoRA adapter; one process,
    or as many as torchrun starts, which share the model with FSDP2 and each batch.

    A part that is made here has its arguments in a mapping, and can be given as an
    object instead: ``engine={"num_replicas": 4}`` or ``engine=my_engine``.

    Args:
        model: a folder or hub name, or a model of transformers, for which ``engine`` is
            an object, too.

    Keyword Args:
        prompts: as for :class:`.AsyncLLMCollector`, as are ``rewards``,
            ``group_rewards``, ``step``, ``tools``, ``max_turns``, ``query_key``,
            ``system_prompt``, ``agent``, ``group_size``, ``groups_per_batch``,
            ``max_staleness``, ``on_stale`` and ``keep_group``.
        env (callable, optional): makes an environment of TorchRL, instead of functions.
        steps (int, optional): batches to train on. By default ``epochs`` passes over
            the prompts.
        epochs (int): passes over the prompts. Defaults to 1.
        generate_kwargs (dict, optional): sampling parameters. Defaults to 512 tokens at
            temperature 1.
        chat_template (str, optional): of policy and saved model.
        method (str): ``"grpo"``, ``"dapo"``, ``"dr_grpo"``, ``"gspo"``, ``"cispo"`` or
            ``"rloo"``; see ``trainers.methods``. Defaults to ``"grpo"``.
        advantage: one of ``objectives.advantages.ADVANTAGES``, or a function. Defaults
            to the method's.
        loss (dict or callable, optional): arguments of the method's loss, or what makes
            a loss of an actor.
        correction: preset or configuration of off-policy correction. Defaults to None.
        kl_to_ref_coeff (float): of the divergence from the model before training.
            Defaults to 0: none.
        lr (float): learning rate. Defaults to 1e-6, or 1e-5 with ``lora``.
        optimizer (dict or callable, optional): further arguments of AdamW, or what
            makes an optimizer of the parameters. Defaults to no weight decay.
        schedule (str): of transformers' schedules. Defaults to
            ``"constant_with_warmup"``.
        warmup_steps (int): Defaults to 0.
        minibatches, epochs_per_batch, max_tokens_per_pass, clip_grad_norm: as for
            :class:`.Learner`, there ``epochs``.
        packing (str or bool): responses without padding in these passes, as for
            :class:`.CorrectedGRPOLoss`. Defaults to ``"auto"``: if the model can.
        lora (dict, optional): arguments of PEFT's ``LoraConfig``, to train an adapter.
        gradient_checkpointing (bool, optional): Defaults to True on GPUs.
        dtype (torch.dtype or str): of the trainer's weights, and so of gradients and
            optimizer. Passes are computed in bfloat16 on GPUs anyway. Defaults to
            ``"float32"``; ``"bfloat16"`` needs half the memory, and loses updates that
            are small beside a weight.
        attn_implementation (str, optional): of the trainer's model in transformers,
            such as ``"sdpa"`` or ``"flash_attention_2"``.
        replay_routing (bool): train a mixture of experts with the experts that the
            engine chose; see :func:`.replay_routing`. Defaults to False.
        colocated (bool): servers on the trainer's GPUs. Defaults to False.
        engine (dict, str, list or RLSGLangEngine, optional): arguments of
            :meth:`.AsyncSGLang.from_pretrained`; the URL of a server that runs, a list
            of these, or arguments of :meth:`.AsyncSGLang.connect`, such as
            ``router_url``, with the key of ``TORCHRL_SGLANG_API_KEY``; or an engine,
            which is not shut down.
        weight_sync (dict, optional): arguments of :class:`.SGLangWeightSyncScheme`.
        collector (dict or callable, optional): further arguments of
            :class:`.AsyncLLMCollector`, or what makes a collector of a policy.
        gateway (dict, optional): arguments of :class:`.Gateway`, for an ``agent``.
        eval_prompts (optional): held-out prompts, for greedy evaluation with the same
            rewards by the same engine.
        eval_every (int): steps between two evaluations. Defaults to 10.
        checkpoint_every (int): steps between two checkpoints. Defaults to 10.
        keep_checkpoints (int): Defaults to 2.
        output: folder of the run. Defaults to ``"runs/grpo"``.
        resume (bool or "auto"): go on with the newest checkpoint of ``output``;
            ``"auto"``: if there is one. Defaults to False: a folder with results is
            refused.
        logger: ``"csv"``, ``"tensorboard"``, ``"wandb"``, a logger of TorchRL or None.
            Defaults to ``"csv"``.
        project (str): of W&B. Defaults to ``"torchrl_sglang"``.
        show_samples (int, optional): steps between two printed responses. Defaults to
            10; None for none.
        seed (int): of weights of adapters, order of prompts and minibatches, and
            servers. Defaults to 0.
        deterministic (bool): two runs on the same machine have the same tokens,
            batches and weights, bit for bit; see the guide on runs that can be
            repeated. It needs ``max_staleness=0`` and servers on GPUs. Defaults to
            False.

    Raises:
        ConfigurationError: if an argument is wrong; nothing has been started.

    Examples:
        >>> def right(conversation, task):
        ...     return float(task["answer"] in conversation.response)
        >>> run = GRPO(  # doctest: +SKIP
        ...     "Qwen/Qwen2.5-0.5B-Instruct",
        ...     prompts=[{"query": "2+2=", "answer": "4"}],
        ...     rewards=right,
        ...     output="runs/sums",
        ... )
        >>> run.train()  # doctest: +SKIP
        PosixPath('runs/sums/model')
    """

    ranks: TrainerRanks
    """The processes that train the model together."""
    engine: Any
    """The engine; ``None`` on other ranks than the first."""
    policy: SGLangWrapper | None
    """Wrapper that generates with the engine; ``None`` likewise."""
    model: Any
    """Model that is trained."""
    learner: Learner
    """Takes the optimizer steps."""
    scheme: SGLangWeightSyncScheme
    """Sends the weights."""
    hyperparameters: dict[str, Any]
    """What the logger is told of the arguments."""
    collector: Any
    """Iterated over on each rank."""
    collector_here: Any
    """The collector itself; ``None`` on other ranks than the first."""
    _checkpoints: Checkpoints
    logger: Any
    """TorchRL's logger; ``None`` on other ranks."""

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        *,
        prompts: Any = None,
        rewards: Any = None,
        group_rewards: Any = None,
        step: Any = None,
        tools: Any = None,
        agent: Any = None,
        env: Callable[[], Any] | None = None,
        max_turns: int | None = None,
        query_key: str = "query",
        system_prompt: str | None = None,
        chat_template: str | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 8,
        groups_per_batch: int = 16,
        steps: int | None = None,
        epochs: int = 1,
        max_staleness: int = 0,
        on_stale: str = "drop",
        keep_group: Callable[..., bool] | None = None,
        method: str = "grpo",
        advantage: str | Callable[..., Any] | None = None,
        loss: Mapping[str, Any] | Callable[[Any], Any] | None = None,
        correction: str | RolloutCorrectionConfig | None = None,
        kl_to_ref_coeff: float = 0.0,
        lr: float | None = None,
        optimizer: Mapping[str, Any]
        | Callable[[Any], torch.optim.Optimizer]
        | None = None,
        schedule: str = "constant_with_warmup",
        warmup_steps: int = 0,
        minibatches: int = 1,
        epochs_per_batch: int = 1,
        max_tokens_per_pass: int = 16_384,
        packing: Packing = "auto",
        clip_grad_norm: float | None = 1.0,
        lora: Mapping[str, Any] | None = None,
        gradient_checkpointing: bool | None = None,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str | None = None,
        replay_routing: bool = False,
        colocated: bool = False,
        engine: Mapping[str, Any] | str | Sequence[str] | RLSGLangEngine | None = None,
        weight_sync: Mapping[str, Any] | None = None,
        collector: Mapping[str, Any] | Callable[[SGLangWrapper], Any] | None = None,
        gateway: Mapping[str, Any] | None = None,
        eval_prompts: Any = None,
        eval_every: int = 10,
        checkpoint_every: int = 10,
        keep_checkpoints: int = 2,
        output: str | os.PathLike[str] = "runs/grpo",
        resume: Resume = False,
        logger: Any = "csv",
        project: str = "torchrl_sglang",
        show_samples: int | None = 10,
        seed: int = 0,
        deterministic: bool = False,
    ) -> None:
        self.hyperparameters = flatten(
            {name: value for name, value in locals().items() if name not in UNTOLD}
        )
        check_counts(
            group_size=(group_size, 2),
            groups_per_batch=(groups_per_batch, 1),
            steps=(steps, 1),
            epochs=(epochs, 1),
            max_staleness=(max_staleness, 0),
            eval_every=(eval_every, 1),
            checkpoint_every=(checkpoint_every, 1),
            keep_checkpoints=(keep_checkpoints, 1),
            minibatches=(minibatches, 1),
            epochs_per_batch=(epochs_per_batch, 1),
            max_tokens_per_pass=(max_tokens_per_pass, 1),
            warmup_steps=(warmup_steps, 0),
            show_samples=(show_samples, 1),
            seed=(seed, 0),
        )
        if resume != "auto":
            check_flag("resume", resume)
        self._given_model = model
        self._functions = {
            "rewards": rewards,
            "group_rewards": group_rewards,
            "step": step,
            "tools": tools,
            "max_turns": max_turns,
            "system_prompt": system_prompt,
        }
        self._prompts, self._eval_prompts = prompts, eval_prompts
        self._agent, self._env, self._gateway_arguments = agent, env, gateway
        self.query_key, self._chat_template = query_key, chat_template
        self.sampling = {**SAMPLING, **(generate_kwargs or {})}
        self.group_size, self.groups_per_batch = group_size, groups_per_batch
        self.steps = count_steps(steps, epochs, prompts, groups_per_batch)
        self._staleness: dict[str, Any] = {
            "max_staleness": max_staleness,
            "on_stale": on_stale,
        }
        self._keep_group, self._method = keep_group, find_method(method)
        self._trajectory_return: TrajectoryReturn = "sum" if agent is None else "mean"
        self.advantage = GroupAdvantage(
            group_size,
            advantage or self._method.advantage,
            trajectory_return=self._trajectory_return,
        )
        self._loss, self._packing = loss, packing
        self._correction = None if correction is None else as_config(correction)
        self._kl_to_ref_coeff = kl_to_ref_coeff
        self._lr = lr if lr is not None else (1e-6 if lora is None else 1e-5)
        self._make_optimizer = optimizer_of(optimizer, self._lr)
        self._schedule, self._warmup_steps = schedule, warmup_steps
        self._learner_arguments: dict[str, Any] = {
            "minibatches": minibatches,
            "epochs": epochs_per_batch,
            "max_tokens_per_pass": max_tokens_per_pass,
            "clip_grad_norm": clip_grad_norm,
        }
        self._optimizer_steps = minibatches * epochs_per_batch
        self._lora, self._gradient_checkpointing = lora, gradient_checkpointing
        self._dtype, self._attn_implementation = check_dtype(dtype), attn_implementation
        replays = check_flag("replay_routing", replay_routing)
        self._token_columns = (ROUTED_EXPERTS,) if replays else ()
        self.colocated = colocated
        self._engine, self._weight_sync = engine, dict(weight_sync or {})
        self._collector_arguments = collector
        self.eval_every, self.checkpoint_every = eval_every, checkpoint_every
        self._keep_checkpoints = keep_checkpoints
        self.folder, self._resume = Path(output), resume
        self._logger, self._project = logger, project
        self._show_samples, self._seed = show_samples, seed
        self._deterministic = check_flag("deterministic", deterministic)
        self._identity = {
            "model": "given" if isinstance(model, nn.Module) else os.fspath(model),
            "group_size": group_size,
            "groups_per_batch": groups_per_batch,
            "method": method,
            "lora": None if lora is None else dict(lora),
            "seed": seed,
        }
        self.step = 0
        """Batches that were trained on."""
        self.best: float | None = None
        """Greatest ``eval/reward`` so far."""
        self.metrics: dict[str, float] = {}
        """Of the last step."""
        self._described: dict[str, float] = {}
        self._saved = 0
        self._saved_state: dict[str, Any] | None = None
        self._stack: ExitStack | None = None
        self._check()

    def _check(self) -> None:
        """Refuses what does not fit together, before anything is started."""
        check_packing(self._packing)
        if callable(self._loss) and self._packing != "auto":
            raise ConfigurationError(
                f"packing={self._packing!r} is an argument of the loss, and loss is a "
                f"function that makes one; give it there."
            )
        max_staleness = self._staleness["max_staleness"]
        check_placement(self._given_model, self._engine, self.colocated, max_staleness)
        if self._deterministic:
            check_repeatable(
                self._engine,
                max_staleness=max_staleness,
                collector=self._collector_arguments,
                agent=self._agent,
            )
        whole = {"agent": self._agent, "env": self._env}
        check_collector(
            self._collector_arguments, self._prompts, {**self._functions, **whole}
        )
        if not callable(self._collector_arguments) and not any(whole.values()):
            check_prompts("prompts", self._prompts, self.query_key)
            if self._eval_prompts is not None:
                check_prompts("eval_prompts", self._eval_prompts, self.query_key)
        for name, given, kind in (
            ("loss", self._loss, self._method.loss),
            ("collector", self._collector_arguments, AsyncLLMCollector),
            ("gateway", self._gateway_arguments, Gateway),
        ):
            if isinstance(given, Mapping):
                check_keywords(name, given, kind)
        nothing = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        make_schedule(self._schedule, nothing, self._warmup_steps, self.steps)

    # The loop.

    def train(self) -> Path:
        """Trains until all steps are done, and returns the folder of the model.

        Raises:
            ConfigurationError: if the folder is of another run.
            CollectionError: if functions or the engine failed for good.
            NotFiniteError: if gradients or weights are not finite.
            CheckpointError: if a checkpoint could not be written.
        """
        with self:
            self.begin()
            for batch in self.batches():
                self.step += 1
                with self.memory_for_training():
                    metrics = self.learner.train(batch, self.collector.policy_version)
                self.clock.done("train")
                self.update_weights()
                self.clock.done("update")
                if self.is_due(self.eval_every):
                    metrics |= self.evaluate()
                self.report(metrics)
                if self.is_due(self.checkpoint_every):
                    self.save()
            return self.finish()

    def begin(self) -> None:
        """Goes on with a checkpoint, if there is one, and sends the weights."""
        state = self._saved_state
        goes_on = self.ranks.share(state is not None)
        if goes_on:
            self._checkpoints.restore(self.learner)
            self.step = self.ranks.share(0 if state is None else state["step"])
            self.best = self.ranks.share(None if state is None else state["best"])
        self.update_weights()
        if goes_on:
            self.collector.load_state_dict((state or {}).get("collector", {}))
            # More ranks than were saved have random numbers of their own.
            random: Any = self.ranks.share(None if state is None else state["random"])
            for known in random[self.ranks.rank :][:1]:
                set_random_state(known)
        self._saved, self._saved_state = self.step, None
        if self.ranks.is_first:
            rollouts = self.folder / ROLLOUTS
            forget_later_steps(self.folder, self.step)
            self._rollouts = Rollouts(rollouts)
            assert self._stack is not None
            self._stack.callback(self._rollouts.close)
            if goes_on:
                tell(f"goes on after step {self.step}")
        if self.step == 0:
            self.report(self.evaluate())
        self.clock = PhaseClock()

    def batches(self) -> Iterator[TensorDictBase]:
        """Yields this rank's share of each batch, with advantages."""
        prepared = map(self._prepare, self.collector)
        for batch in prepared if self.ranks.size == 1 else self.collector:
            self.clock.done("collect")
            yield batch

    def _prepare(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds advantages to a whole batch, and describes it, on the first rank."""
        batch = self.advantage(batch)
        self._described = describe(
            batch,
            policy_version=self.collector_here.policy_version,
            group_size=self.group_size,
            max_tokens=self._max_tokens,
            trajectory_return=self._trajectory_return,
        )
        self._rollouts.write(self.step + 1, batch, self.query_key)
        every = self._show_samples
        if every is not None and self.step % every == 0:
            tell(sample_of(batch, self.query_key))
        return batch

    def update_weights(self) -> None:
        """Sends the weights to the servers, which generate with them from now on."""
        self.collector.update_policy_weights_()
        if self.engine is not None:
            self.engine.wake_up()

    @contextmanager
    def memory_for_training(self) -> Iterator[None]:
        """Has servers on the trainer's GPUs release their memory meanwhile."""
        if not self.colocated:
            yield
            return
        # An adapter is loaded beside base weights, which nothing would bring back.
        memory = "kv_cache" if self._lora is not None else ("weights", "kv_cache")
        self.ranks.first(lambda: self.engine and self.engine.sleep(memory))
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.ranks.barrier()
        self.ranks.first(lambda: self.engine and self.engine.wake_up("weights"))

    @property
    def _max_tokens(self) -> int | None:
        """Longest response of a row; that of an agent may have several."""
        return self.sampling["max_new_tokens"] if self._agent is None else None

    def is_due(self, every: int) -> bool:
        """Returns whether a step is one of every so many."""
        return self.step % every == 0

    def evaluate(self) -> dict[str, float]:
        """Returns the mean rewards of held-out prompts, greedily; keeps the best model.

        The engine generates, with the weights that it has.
        """
        if self._eval_prompts is None:
            return {}
        found = self.ranks.first(self._evaluate)
        reward = found["eval/reward"]
        if self.step and (self.best is None or reward > self.best):
            save_model(self.model, self.policy, self.folder / "best", self.ranks)
        if self.best is None or reward > self.best:
            self.best = reward
        self.clock.done("evaluate")
        return found if self.ranks.is_first else {}

    def _evaluate(self) -> dict[str, float]:
        prompts = list(self._eval_prompts)
        policy = self.policy
        assert policy is not None
        if self._agent is None:
            policy = policy.get_new_version(generate_kwargs={**self.sampling, **GREEDY})
        collector = self._make_collector(
            policy,
            prompts=prompts,
            group_size=1,
            groups_per_batch=len(prompts),
            total_groups=len(prompts),
        )
        with collector:
            batch = next(iter(collector))
        metrics = describe(
            batch,
            policy_version=collector.policy_version,
            group_size=1,
            max_tokens=self._max_tokens,
            trajectory_return=self._trajectory_return,
        )
        wanted = {
            "batch/reward": "eval/reward",
            "batch/response_tokens": "eval/response_tokens",
            "batch/truncated": "eval/truncated",
        }
        return {
            wanted.get(name, f"eval_{name}"): value
            for name, value in metrics.items()
            if name in wanted or name.startswith("reward/")
        }

    def report(self, metrics: dict[str, float]) -> None:
        """Logs the metrics of a step, and prints a line."""
        seconds = self.clock.take()
        if not self.ranks.is_first or not (metrics or self.step):
            return
        metrics = {**self._described, **metrics, **seconds}
        spent = sum(seconds.values())
        if "batch/tokens" in metrics and spent:
            metrics["time/tokens_per_second"] = metrics["batch/tokens"] / spent
        if self.logger is not None:
            self.logger.log_metrics(metrics, step=self.step)
        self.metrics = metrics
        tell(line_of(self.step, self.steps, metrics))

    def save(self) -> None:
        """Saves a checkpoint, which is written meanwhile; all ranks call it.

        Raises:
            CheckpointError: if the one before could not be written.
        """
        random = self.ranks.gather(random_state())
        rest: dict[str, Any] = {}
        if self.ranks.is_first:
            kind = self._logger if isinstance(self._logger, str) else None
            logger = None if kind is None else self.logger.state_dict()
            rest = {
                "collector": self.collector.state_dict(),
                "random": random,
                "best": self.best,
                "logger": (kind, logger),
            }
        self._checkpoints.save(self.step, self.learner, rest)
        self._saved = self.step
        self.clock.done("save")

    def finish(self) -> Path:
        """Saves what was learned; all ranks call it.

        Returns:
            Path: the folder of the model, as transformers reads it.
        """
        if self._saved != self.step:
            self.save()
        folder = self.folder / "model"
        save_model(self.model, self.policy, folder, self.ranks)
        self._checkpoints.wait()
        if self.ranks.is_first:
            tell(f"{self.step} steps. The model is in {folder}.{self._bound()}")
        return folder

    def _bound(self) -> str:
        """Says what bounded the run, unless there was nothing to do."""
        if not any(self.clock.totals.values()):
            return ""
        stats: Any = getattr(self.collector_here, "stats", dict)()
        in_turn = self._staleness["max_staleness"] == 0
        said = summarize(self.clock.totals, stats.get("bottleneck"), in_turn=in_turn)
        return f" {said}"

    # The parts.

    def __enter__(self) -> Self:
        """Makes the parts of the run, starting servers; they end with the block."""
        if self._stack is not None:
            raise ConfigurationError("This run is under way already.")
        with ExitStack() as stack:
            self._stack = stack
            try:
                self._make_parts(stack)
            except BaseException:
                self._stack = None
                raise
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(*exception)

    def _make_parts(self, stack: ExitStack) -> None:
        self.ranks = find_trainer_ranks()
        stack.callback(self.ranks.end)
        stack.enter_context(_quiet())
        self.clock = PhaseClock()
        if self._deterministic:
            stack.enter_context(deterministic_algorithms())
        torch.manual_seed(self._seed)
        device = self.ranks.device()
        self.logger = None
        # Errors are found before servers are started, which takes minutes.
        self._checkpoints = Checkpoints(
            self.folder,
            keep=self._keep_checkpoints,
            identity=self._identity,
            ranks=self.ranks,
        )
        stack.callback(self._checkpoints.close)
        self.ranks.first(self._open_folder)
        self.engine = self.policy = None
        self.ranks.first(lambda: self._start_engine(stack))
        tokenizer = self._tokenizer()
        self.model = self._load(device)
        if self._token_columns:
            stack.enter_context(replay_routing(self.model))
        self.learner = self._make_learner(device, tokenizer)
        self.scheme = SGLangWeightSyncScheme(
            self.engine, self.model, **self._weight_sync
        )
        stack.callback(self.scheme.shutdown)

        def make() -> Any:
            assert self.policy is not None
            return self._make_collector(self.policy, **self._collection())

        if self.ranks.size == 1:
            self.collector = self.collector_here = make()
            attach_weight_sync(self.collector, self.scheme)
        else:
            self.collector = SharedCollector(
                make,
                weight_sync_schemes={"policy": self.scheme},
                prepare=self._prepare,
            )
            self.collector_here = self.collector.collector
        stack.callback(self.collector.shutdown)

    def _open_folder(self) -> None:
        """Checks the folder, before servers are started."""
        self._saved_state = state = self._checkpoints.load(self._resume)
        kind, saved = (None, None) if state is None else state["logger"]
        goes_on = state is not None and kind == self._logger
        self.logger = make_logger(
            self._logger,
            self.folder,
            self.folder.name,
            self._project,
            saved if goes_on else None,
        )
        if self.logger is not None and not goes_on:
            name = {"model": self._identity["model"]}
            self.logger.log_hparams({**name, **self.hyperparameters})

    def _start_engine(self, stack: ExitStack) -> None:
        given = self._engine
        if isinstance(given, RLSGLangEngine):
            self.engine = given
        elif (running := connect_arguments(given)) is not None:
            self.engine = stack.enter_context(AsyncSGLang.connect(**running))
        else:
            assert given is None or isinstance(given, Mapping)
            arguments = server_arguments(
                {**self._columns_of_servers(), **self._switches, **(given or {})},
                self.ranks,
                colocated=self.colocated,
                lora=self._lora,
                by_file="directory" in self._weight_sync,
                seed=self._seed,
            )
            model = os.fspath(self._given_model)  # type: ignore[arg-type]
            tell(f"Starting the servers of {model} ...")
            engine = AsyncSGLang.from_pretrained(model, **arguments)
            self.engine = stack.enter_context(engine)
            if "launcher" in arguments and torch.cuda.is_available():
                gpus = visible_devices()[: self.ranks.local_size]
                check_gpus(self.engine.placements, gpus)
        columns = find_columns(self._token_columns)
        check_columns(columns, self.sampling, self.engine.capabilities)
        self.policy = SGLangWrapper(
            self.engine,
            token_columns=columns,
            input_mode="history",
            generate_kwargs=self.sampling,
            chat_template=self._chat_template,
            return_log_probs=True,
            prefer_tokens=True,
        )
        self.gateway: Gateway | None = None
        if self._agent is not None:
            arguments = {
                "chat_template": self._chat_template,
                "default_sampling_params": self.sampling,
                "token_columns": columns,
                **(self._gateway_arguments or {}),
            }
            self.gateway = stack.enter_context(Gateway(self.engine, **arguments))

    @property
    def _switches(self) -> dict[str, Any]:
        """Returns the argument of servers and collector of a run that is repeatable."""
        return {"deterministic": True} if self._deterministic else {}

    def _columns_of_servers(self) -> dict[str, Any]:
        """Returns the arguments of servers that report token columns."""
        if not self._token_columns:
            return {}
        path = os.fspath(self._given_model)  # type: ignore[arg-type]
        if find_experts(load_model_config(path)) is None:
            raise ConfigurationError(
                f"replay_routing=True is for mixtures of experts, and {path!r} is "
                f"none; leave it out."
            )
        return {"enable_return_routed_experts": True}

    def _tokenizer(self) -> Any:
        """Returns the tokenizer on each rank, padding on the left."""
        if self.policy is not None:
            tokenizer = self.policy.tokenizer
        else:
            tokenizer = AutoTokenizer.from_pretrained(os.fspath(self._given_model))  # type: ignore[arg-type]
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def _load(self, device: torch.device, *, trained: bool = True) -> Any:
        """Returns the model that is trained, or what it was before."""
        checkpointing = self._gradient_checkpointing
        if checkpointing is None:
            checkpointing = device.type == "cuda"
        return load_model(
            self._given_model,
            device=device,
            dtype=self._dtype,
            attn_implementation=self._attn_implementation,
            lora=self._lora if trained else None,
            gradient_checkpointing=trained and checkpointing,
            ranks=self.ranks,
        )

    def _make_learner(self, device: torch.device, tokenizer: Any) -> Learner:
        actor = scorer(self.model, tokenizer)
        masking: MaskingStrategy = "sft" if self._agent is None else "rlhf"
        correction = self._correction
        # Only an old policy that is recomputed needs a pass before the loss.
        recomputes = correction is not None and not (
            correction.bypass_mode or correction.proximal == "interpolated"
        )
        optional: dict[str, Any] = {}
        if self._method.needs_max_tokens:
            optional["max_tokens"] = self.sampling["max_new_tokens"]
        arguments = {
            "entropy_bonus": False,
            "masking_strategy": masking,
            "kl_to_ref_coeff": self._kl_to_ref_coeff or None,
            "correction": None if recomputes else correction,
            "packing": self._packing,
            "device": device,
            **optional,
            **self._method.arguments,
        }
        if callable(self._loss):
            loss = self._loss(actor)
        else:
            loss = self._method.loss(actor, **{**arguments, **(self._loss or {})})
        correct = None
        if recomputes:
            assert correction is not None
            correct = OffPolicyCorrection(
                correction,
                masking_strategy=masking,
                aggregation="prompt_mean"
                if loss.aggregation == "prompt_mean"
                else "token_mean",
            )
        reference: Any = None
        if self._kl_to_ref_coeff:
            reference = "adapter"
            if self._lora is None:
                reference = self._load(device, trained=False).requires_grad_(False)
        optimizer = self._make_optimizer(
            [each for each in self.model.parameters() if each.requires_grad]
        )
        total = None if self.steps is None else self.steps * self._optimizer_steps
        return Learner(
            loss,
            optimizer,
            make_schedule(self._schedule, optimizer, self._warmup_steps, total),
            correct=correct,
            reference=reference,
            autocast=device.type == "cuda" and self.ranks.size == 1,
            ranks=self.ranks,
            **self._learner_arguments,
        )

    def _collection(self) -> dict[str, Any]:
        """Returns the arguments of the collector that evaluation does not share."""
        total = -1 if self.steps is None else self.steps * self.groups_per_batch
        return {
            "prompts": self._prompts,
            "group_size": self.group_size,
            "groups_per_batch": self.groups_per_batch,
            "total_groups": total,
            "keep_group": self._keep_group,
            "shuffle": hasattr(self._prompts, "__getitem__"),
            "seed": self._seed,
            **self._switches,
            **self._staleness,
        }

    def _make_collector(self, policy: SGLangWrapper, **arguments: Any) -> Any:
        given = self._collector_arguments
        if callable(given):
            return given(policy)
        common: dict[str, Any] = {"query_key": self.query_key}
        if self._agent is not None:
            common |= {"agent": self._agent, "gateway": self.gateway}
        elif self._env is not None:
            common["env"] = self._env
        else:
            common |= self._functions
        return AsyncLLMCollector(
            policy=policy, **{**common, **arguments, **(given or {})}
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out what TorchRL logs of each weight update: a step's line tells it."""
    level = torchrl_logger.level
    torchrl_logger.setLevel(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            for text in (
                # TorchRL's, about its own use of PyTorch.
                "size_average and reduce args",
                # PyTorch's, about checkpoints of a single process.
                "torch.distributed is disabled, unavailable or uninitialized",
            ):
                warnings.filterwarnings("ignore", text, UserWarning)
            yield
    finally:
        torchrl_logger.setLevel(level)
