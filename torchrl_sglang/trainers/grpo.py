"""GRPO: a training run in one call, and its loop.

:meth:`GRPO.train` is the loop. It is short, and made of public parts, so that it can be
copied and changed: the engine, the policy, the collector, the :class:`.Learner` and the
weight-sync scheme are attributes of the run, and its steps are methods of ``run.Run``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.advantages import GroupAdvantage
from torchrl_sglang.objectives.config import RolloutCorrectionConfig, as_config
from torchrl_sglang.objectives.packing import Packing
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.requests.request import check_logprobs_mode
from torchrl_sglang.requests.token_columns import ROUTED_EXPERTS
from torchrl_sglang.support.checks import check_flag, refuse_unknown
from torchrl_sglang.trainers.arguments import (
    check_attention,
    check_counts,
    check_dtype,
    check_folder,
    check_minibatches,
    check_parts,
    check_placement,
    check_recording,
    count_groups,
    read_sampling,
    warn_of_staleness,
)
from torchrl_sglang.trainers.checkpoints import Resume
from torchrl_sglang.trainers.collecting import Collecting
from torchrl_sglang.trainers.deterministic import check_repeatable
from torchrl_sglang.trainers.methods import find_method
from torchrl_sglang.trainers.models import identify
from torchrl_sglang.trainers.optimizers import optimizer_of
from torchrl_sglang.trainers.progress import StepsShown, check_progress
from torchrl_sglang.trainers.records import Records
from torchrl_sglang.trainers.report import flatten
from torchrl_sglang.trainers.run import Run
from torchrl_sglang.trainers.serving import Serving
from torchrl_sglang.trainers.training import Training
from torchrl_sglang.types import LogProbsMode
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

UNTOLD = ("self", "__class__", "model", "prompts", "eval_prompts", "recorder")
"""Local names that a logger is not told of; those of arguments may be large."""


class GRPO(Run):
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
        epochs (int): passes over the prompts. The last batch has the rest, unless it
            has fewer responses than there are ranks: a warning says that it is left
            out. Defaults to 1.
        generate_kwargs (dict, optional): sampling parameters. Defaults to 512 tokens at
            temperature 1.
        chat_template (str, optional): of policy and saved model.
        chat_template_kwargs (dict, optional): variables of the chat template, such as
            ``{"enable_thinking": False}``. An agent's requests have their own.
        method (str): ``"grpo"``, ``"dapo"``, ``"dr_grpo"``, ``"gspo"``, ``"cispo"`` or
            ``"rloo"``; see ``trainers.methods``. Defaults to ``"grpo"``.
        advantage: one of ``objectives.advantages.ADVANTAGES``, or a function. Defaults
            to the method's.
        loss (dict or callable, optional): arguments of the method's loss, or what makes
            a loss of an actor.
        correction: preset or configuration of off-policy correction. Defaults to None.
        kl_to_ref_coeff (float): of the divergence from the model before training.
            Defaults to 0: none.
        lr (float): learning rate, unless ``optimizer`` has one. Defaults to 1e-6, or
            1e-5 with ``lora``.
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
        logprobs_mode (str): of the engine's log-probs, as for :class:`.SGLangWrapper`.
            ``"behaviour"`` trains the distribution that tokens are drawn from, with any
            ``temperature``, ``top_k``, ``top_p`` and ``min_p`` of ``generate_kwargs``:
            see ``replay_sampling`` of :class:`.CorrectedGRPOLoss`. Evaluation is
            greedy as ever. Defaults to ``"model"``, which is the same at temperature 1
            without these, and warns of them.
        colocated (bool): servers on the trainer's GPUs. Defaults to False.
        engine (dict, str, list or RLSGLangEngine, optional): arguments of
            :meth:`.AsyncSGLang.from_pretrained`; the URL of a server that runs, a list
            of these, or arguments of :meth:`.AsyncSGLang.connect`, such as
            ``router_url``, with the key of ``TORCHRL_SGLANG_API_KEY``; or an engine,
            which is not shut down.
        weight_sync (dict, optional): arguments of :class:`.SGLangWeightSyncScheme`.
        collector (dict or callable, optional): further arguments of
            :class:`.AsyncLLMCollector`, or what makes a collector of a policy, with
            prompts, rewards and all else that it collects.
        gateway (dict, optional): arguments of :class:`.Gateway`, for an ``agent``.
        eval_prompts (optional): held-out prompts, for greedy evaluation with the same
            rewards by the same engine; ``eval/prompts`` is how many were scored. An
            ``agent`` sets the sampling parameters of its requests itself, and those
            that it leaves out are the run's, as in training. The folder ``best`` has
            the first model of the greatest ``eval/reward`` above that before training.
        eval_every (int): steps between two evaluations. Defaults to 10.
        checkpoint_every (int): steps between two checkpoints. Defaults to 10.
        keep_checkpoints (int): Defaults to 2.
        output: folder of the run. Defaults to ``"runs/grpo"``.
        resume (bool or "auto"): go on with the newest checkpoint of ``output``;
            ``"auto"``: if there is one. Defaults to False: a folder with results is
            refused.
        logger: ``"csv"``, ``"tensorboard"``, ``"wandb"``, ``"mlflow"``,
            ``"trackio"``, a logger of TorchRL or None. Defaults to ``"csv"``.
        project (str): of W&B and Trackio, and MLflow's experiment. Defaults to
            ``"torchrl_sglang"``.
        metrics_port (int, optional): port of this machine that Prometheus scrapes, 0
            for a free one; see :func:`.serve_metrics`. Defaults to None.
        show_samples (int, optional): steps between two printed responses, and between
            two tables of responses where the logger has tables. Defaults to 10; None
            for none.
        progress (bool or "auto"): whether a bar shows how far the run is. Defaults to
            ``"auto"``: in a terminal or a notebook; elsewhere, as in a log file, a line
            a minute says what a long step does. Lines of steps are printed anyway, and
            other ranks print nothing.
        recorder (RunRecorder or bool): records the run, for ``torchrl-sglang view``.
            Defaults to True: in the folder ``record`` of ``output``, at most 1 GiB.
        seed (int): of weights of adapters, order of prompts and minibatches, and
            servers. Defaults to 0.
        deterministic (bool): seeds for every sample, batches in the order of prompts,
            and deterministic kernels, so that a second run on the same machine is
            the same; the guide on runs that can be repeated says how far that is shown.
            It needs ``max_staleness=0`` and servers on GPUs. Defaults to False.

    Raises:
        ConfigurationError: if an argument is wrong, as far as it can be known before
            servers run; nothing has been started. What only they or the hub know, such
            as whether a token is in the vocabulary, :meth:`train` raises.

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

    @refuse_unknown
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
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
        logprobs_mode: LogProbsMode = "model",
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
        metrics_port: int | None = None,
        progress: StepsShown = "auto",
        show_samples: int | None = 10,
        recorder: RunRecorder | bool = True,
        seed: int = 0,
        deterministic: bool = False,
    ) -> None:
        hyperparameters = flatten(
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
        check_minibatches(minibatches, group_size * groups_per_batch)
        check_parts(
            lora=lora,
            weight_sync=weight_sync,
            gateway=gateway,
            loss=loss,
            optimizer=optimizer,
            collector=collector,
            agent=agent,
            env=env,
        )
        check_attention(attn_implementation)
        # Finds wrong options now.
        SGLangWeightSyncScheme(None, None, **(weight_sync or {}))
        if isinstance(resume, str) and resume != "auto":
            raise ConfigurationError(
                f"resume must be True, False or 'auto', got {resume!r}."
            )
        if resume != "auto":
            check_flag("resume", resume)
        check_placement(model, engine, colocated, max_staleness)
        warn_of_staleness(max_staleness, correction, loss)
        if not isinstance(model, nn.Module):
            model = os.path.expanduser(model)
        if check_flag("deterministic", deterministic):
            check_repeatable(
                engine, max_staleness=max_staleness, collector=collector, agent=agent
            )
        groups = count_groups(steps, epochs, prompts, groups_per_batch)
        sampling = read_sampling(generate_kwargs)
        found = find_method(method)
        replays = check_flag("replay_routing", replay_routing)
        weight_sync = dict(weight_sync or {})
        collecting = Collecting(
            prompts=prompts,
            eval_prompts=eval_prompts,
            functions={
                "rewards": rewards,
                "group_rewards": group_rewards,
                "step": step,
                "tools": tools,
                "max_turns": max_turns,
                "system_prompt": system_prompt,
            },
            agent=agent,
            env=env,
            query_key=query_key,
            group_size=group_size,
            groups_per_batch=groups_per_batch,
            groups=groups,
            epochs=epochs,
            max_staleness=max_staleness,
            on_stale=on_stale,
            keep_group=keep_group,
            collector=collector,
            seed=seed,
            deterministic=deterministic,
        )
        serving = Serving(
            model=model,
            engine=engine,
            sampling=sampling,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            opening=collecting.opening(),
            token_columns=(ROUTED_EXPERTS,) if replays else (),
            logprobs_mode=check_logprobs_mode(logprobs_mode),
            has_agent=agent is not None,
            gateway=gateway,
            colocated=colocated,
            lora=lora,
            weights_by_file="directory" in weight_sync,
            seed=seed,
            deterministic=deterministic,
        )
        training = Training(
            model=model,
            method=found,
            loss=loss,
            masking="sft" if agent is None else "rlhf",
            max_new_tokens=sampling["max_new_tokens"],
            packing=packing,
            correction=None if correction is None else as_config(correction),
            kl_to_ref_coeff=kl_to_ref_coeff,
            make_optimizer=optimizer_of(optimizer, lr, 1e-6 if lora is None else 1e-5),
            schedule=schedule,
            warmup_steps=warmup_steps,
            steps=collecting.steps,
            minibatches=minibatches,
            epochs_per_batch=epochs_per_batch,
            max_tokens_per_pass=max_tokens_per_pass,
            clip_grad_norm=clip_grad_norm,
            lora=lora,
            gradient_checkpointing=gradient_checkpointing,
            dtype=check_dtype(dtype),
            attn_implementation=attn_implementation,
        )
        records = Records(
            folder=check_folder("output", output),
            identity={
                "model": identify(model),
                "group_size": group_size,
                "groups_per_batch": groups_per_batch,
                "method": method,
                "lora": None if lora is None else dict(lora),
                "seed": seed,
            },
            hyperparameters=hyperparameters,
            resume=resume,
            keep_checkpoints=keep_checkpoints,
            logger=logger,
            project=project,
            show_samples=show_samples,
            metrics_port=metrics_port,
            progress=check_progress(progress),
            recorder=check_recording(recorder),
        )
        super().__init__(
            serving=serving,
            collecting=collecting,
            training=training,
            records=records,
            weight_sync=weight_sync,
            advantage=GroupAdvantage(
                group_size,
                advantage or found.advantage,
                trajectory_return=collecting.trajectory_return,
            ),
            seed=seed,
            deterministic=deterministic,
        )
        self.eval_every, self.checkpoint_every = eval_every, checkpoint_every

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
