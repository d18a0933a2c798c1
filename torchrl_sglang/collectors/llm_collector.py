"""TorchRL's LLM collector with weight-sync schemes for SGLang and quick rollouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Set
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDictBase,
    lazy_stack,
    set_list_to_stack,
)
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import AsyncEnvPool, Compose, EnvBase, Transform, TransformedEnv

from torchrl_sglang.collectors.copies import (
    FastCopied,
    Fresh,
    copy_turns,
    has_private_keys,
    next_input,
    step,
)
from torchrl_sglang.collectors.weight_sync import (
    attach_weight_sync,
    check_schemes,
    detach_weight_sync,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.support.garbage import collect_garbage_afterwards
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme


class SGLangLLMCollector(LLMCollector):
    """TorchRL's LLM collector, several times faster, with weight-sync schemes.

    Takes all arguments of :class:`~torchrl.collectors.llm.LLMCollector`, yields the
    same batches key by key, and calls :func:`attach_weight_sync` on itself. Most of
    that collector's time goes into clones of nested TensorDicts, during which the
    servers wait; this one copies the same trees directly.

    Keyword Args:
        weight_sync_schemes (dict, optional): ``{"policy": scheme}``.

    Raises:
        ConfigurationError: if a scheme is not an ``SGLangWeightSyncScheme`` or is for a
            model other than ``"policy"``, or if the policy has ``num_samples``.

    Examples:
        >>> scheme = SGLangWeightSyncScheme(engine, model)
        >>> from tensordict import TensorDict
        >>> from torchrl.envs.llm import ChatEnv
        >>> queries = [TensorDict(query=["Hi"], batch_size=1)]
        >>> env = ChatEnv.from_dataloader(queries, tokenizer=tokenizer, batch_size=(1,))
        >>> collector = SGLangLLMCollector(
        ...     env,
        ...     policy=SGLangWrapper(engine),
        ...     dialog_turns_per_batch=1,
        ...     track_policy_version=True,
        ...     weight_sync_schemes={"policy": scheme},
        ... )
        >>> report = collector.update_policy_weights_()
        >>> report.version == engine.weight_version
        True
        >>> scheme.shutdown()
    """

    last_sync_report: SyncReport | None = None
    """Report of the last weight update; ``None`` before the first."""

    _shuttle: TensorDictBase | None

    def __init__(
        self,
        *args: Any,
        weight_sync_schemes: Mapping[str, SGLangWeightSyncScheme] | None = None,
        **kwargs: Any,
    ) -> None:
        schemes = check_schemes(weight_sync_schemes)
        super().__init__(*args, **kwargs)
        _check_samples(self.policy)
        for scheme in schemes.values():
            attach_weight_sync(self, scheme)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Ends the collector, and has its scheme's sender forget it."""
        detach_weight_sync(self)
        super().shutdown(*args, **kwargs)

    # The methods below are LLMCollector's, with the copies of copies.py.

    def _rollout_all(self) -> TensorDictBase:
        if self.reset_at_each_iter or self._shuttle is None:
            with collect_garbage_afterwards():
                self._shuttle = self.env.reset()
        steps: list[TensorDictBase] = []
        turns_left = self.dialog_turns_per_batch
        while turns_left > 0:
            steps.append(
                self._step(turns_left if self.reset_at_each_iter else math.inf)
            )
            turns_left -= steps[-1].numel()
        with collect_garbage_afterwards():
            if self.flatten_data and all(map(_is_column, steps)):
                rows = zip(*(turns.tensordicts for turns in steps), strict=True)
                return LazyStackedTensorDict(*itertools.chain(*rows))
            batch = lazy_stack(steps, -1)
            return batch.view(-1) if self.flatten_data else batch

    def _rollout_yield_trajs(self) -> TensorDictBase:
        if self._shuttle is None:
            self._shuttle = self.env.reset()
        while self._result_numel < self.dialog_turns_per_batch:
            output = self._step()
            for index, turn in enumerate(output.unbind(0)):
                self._yield_queues[index].append(turn)
                if turn["next", "done"].any():
                    self._result_numel += self._enqueue_completed_traj(index).numel()
        trajectories: list[TensorDictBase] = []
        while (
            sum(trajectory.numel() for trajectory in trajectories)
            < self.dialog_turns_per_batch
        ):
            trajectories.append(self._trajectory_queue.popleft())
        batch: TensorDictBase = torch.cat(trajectories, -1)
        self._result_numel -= batch.numel()
        return batch

    def _step(self, turns_to_reset: float = math.inf) -> TensorDictBase:
        """Returns one turn of each conversation, and prepares the next ones.

        The next ones are not needed after so many turns, which a reset follows.
        """
        if self.verbose:
            torchrl_logger.debug("SGLangLLMCollector: one turn of each conversation.")
        batch = self._respond(self._shuttle)
        with collect_garbage_afterwards():
            output, following, fresh = self._step_env(batch, turns_to_reset)
            collected = output.get("collector", default=None)
            if collected is not None:
                if following is not None:
                    following.set("collector", collected.copy())
                self._update_traj_ids(output)
            self._shuttle = following
            return copy_turns(output, fresh)

    @set_list_to_stack(True)
    def _respond(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        """Returns ``self.policy(tensordict)``."""
        batch: TensorDictBase = self.policy(tensordict)
        return batch

    def _step_env(
        self, batch: TensorDictBase, turns_to_reset: float
    ) -> tuple[TensorDictBase, TensorDictBase | None, Set[str]]:
        """Returns ``env.step_and_maybe_reset(batch)``; no next input if none is needed.

        A conversation that has ended needs one: its environment takes a new prompt.
        The third value has the entries of the output that nothing else refers to.
        """
        env = self.env
        overrides = env.__dict__.keys() & {
            "_compiled_step_and_maybe_reset",
            "_torchrl_native_autoreset",
        }
        if (
            overrides
            or isinstance(env, AsyncEnvPool)
            or type(batch) is not LazyStackedTensorDict
            or batch.device != env.device
        ):
            return *env.step_and_maybe_reset(batch), frozenset()
        output = step(env, batch)
        hooked = _has_hooks(env)
        unused: Set[str] = frozenset() if hooked else self._unused()
        # The environment has the messages of a prompt, too.
        fresh = unused - {getattr(self.policy, "history_key", None)}
        if not hooked and output.numel() >= turns_to_reset and not _ends(env, output):
            return output, None, fresh
        if type(output) is LazyStackedTensorDict:
            following = next_input(env._step_mdp, output, unused)
        else:
            following = env._step_mdp(output)
        if hooked:
            output, following = env._post_step_mdp_hooks(output, following)
        return output, env.maybe_reset(following), fresh

    def _unused(self) -> Set[str]:
        """Returns the entries that the policy drops before it reads anything else."""
        policy = self.policy
        if (
            type(policy) is not SGLangWrapper
            or policy.inplace is not True
            # A wrapper of tokens reads the last turn's masks.
            or policy.input_mode == "tokens"
            or policy.prefer_tokens
        ):
            return frozenset()
        return {key for key in policy.out_keys if isinstance(key, str)}

    @collect_garbage_afterwards()
    def _postproc(self, batch: TensorDictBase) -> TensorDictBase:
        """Applies the user's function and removes private keys."""
        if self.postproc is not None:
            batch = self.postproc(batch)
        if has_private_keys(batch):
            paths = [
                (key,) if isinstance(key, str) else key for key in batch.keys(True)
            ]
            private = [path for path in paths if any(part[0] == "_" for part in path)]
            batch = batch.exclude(*private, inplace=True)
        if self.replay_buffer is not None or type(batch) is not LazyStackedTensorDict:
            return batch
        # TorchRL clones the batch before it is yielded.
        kind = Fresh if self.postproc is None else FastCopied
        return kind(*batch.tensordicts, stack_dim=batch.stack_dim)


def _check_samples(policy: Any) -> None:
    """Refuses a policy whose output has another shape than its input."""
    if not isinstance(policy, SGLangWrapper) or not policy.generate:
        return
    if policy.num_samples is not None:
        raise ConfigurationError(
            f"The policy's num_samples={policy.num_samples} (or generate_kwargs['n']) "
            f"adds a dimension that an environment does not have; leave it out, and "
            f"have the environment repeat each prompt: "
            f"ChatEnv.from_dataloader(repeats={policy.num_samples}, ...)."
        )


def _is_column(turns: TensorDictBase) -> bool:
    """Returns whether turns are a stack of one row for each conversation."""
    return type(turns) is LazyStackedTensorDict and turns.ndim == 1


def _ends(env: EnvBase, output: TensorDictBase) -> bool:
    """Returns whether a conversation ends with this step."""
    following = output.get("next")
    return any(bool(following.get(key).any()) for key in env.done_keys)


def _has_hooks(env: EnvBase) -> bool:
    """Returns whether an environment changes the output of its step."""
    if not isinstance(env, TransformedEnv):
        return env._post_step_mdp_hooks is not None
    return (
        type(env)._post_step_mdp_hooks is not TransformedEnv._post_step_mdp_hooks
        or _is_hook(env.transform)
        or _has_hooks(env.base_env)
    )


def _is_hook(transform: Transform) -> bool:
    if type(transform) is Compose:
        return any(map(_is_hook, transform.transforms))
    return type(transform)._post_step_mdp_hooks is not Transform._post_step_mdp_hooks
