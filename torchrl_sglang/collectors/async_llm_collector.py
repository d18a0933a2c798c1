"""AsyncLLMCollector: keeps the engine full while the trainer trains."""

from __future__ import annotations

import inspect
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase

from torchrl_sglang.collectors.base import GroupCollector, Pause
from torchrl_sglang.collectors.groups.deterministic import check_deterministic
from torchrl_sglang.collectors.groups.filter import GroupFilter, KeepGroup
from torchrl_sglang.collectors.groups.make import GROUP_ARGUMENTS, choose_groups
from torchrl_sglang.collectors.groups.user_functions import check_call
from torchrl_sglang.collectors.options import (
    OnOtherSender,
    RequestOrder,
    check_arguments,
    check_request_order,
)
from torchrl_sglang.collectors.runtime.batches import Batches
from torchrl_sglang.collectors.runtime.collection import Collection
from torchrl_sglang.collectors.runtime.consumer_version import ConsumerVersion
from torchrl_sglang.collectors.runtime.contract import (
    GroupKind,
    GroupSetting,
    ScoresGroup,
)
from torchrl_sglang.collectors.runtime.group_events import GroupEvents, figures_of
from torchrl_sglang.collectors.runtime.stale_mask import StaleMask
from torchrl_sglang.collectors.runtime.versions import PolicyVersions
from torchrl_sglang.collectors.scheduling.admission import Limits
from torchrl_sglang.collectors.scheduling.group_pool import GroupPool, OnStale
from torchrl_sglang.collectors.scheduling.prompts import make_prompts
from torchrl_sglang.collectors.timeouts import CollectorTimeouts
from torchrl_sglang.collectors.weight_sync import (
    attach_weight_sync,
    check_schemes,
    detach_weight_sync,
)
from torchrl_sglang.errors import (
    CollectionError,
    CollectionTimeoutError,
    ConfigurationError,
)
from torchrl_sglang.observer import (
    CollectorStarted,
    Publisher,
    Subscriber,
    WeightsUpdated,
)
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.policies.turns import check_policy
from torchrl_sglang.requests.seeds import SampleSeeds
from torchrl_sglang.support.checks import check_count, check_flag
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme


class AsyncLLMCollector(GroupCollector):
    """Collects conversations side by side, while the trainer trains on earlier ones.

    Each conversation runs at its own pace, and a finished group is replaced at once.
    Groups come out whole, turn after turn, in the layout of TorchRL's ``LLMCollector``
    with ``yield_completed_trajectories=True``: a batch is a lazy stack of turns, the
    turns of a conversation and the conversations of a group one after the other.

    ``groups`` is the kind of conversations: :class:`.FunctionGroups`, continued and
    scored by plain functions, the fastest kind; :class:`.EnvironmentGroups` of an LLM
    environment of TorchRL; or :class:`.AgentGroups` of programs that talk to a gateway.
    Their arguments may be given to the collector itself, as a short form.

    **Staleness.** No token that is trained on comes from weights that are more than
    ``max_staleness`` updates behind the trainer's: a group starts only if it can be
    consumed in time, and the oldest token is checked when a batch is taken. With
    ``max_staleness=0`` nothing is generated between taking a batch and the next weight
    update, as in synchronous training.

    **Use.** ``for batch in collector`` yields batches. With a ``replay_buffer``,
    iterating extends the buffer with each batch and yields ``None``, and :meth:`start`
    extends it in the background, group after group.

    Args:
        groups (GroupKind, optional): the kind of conversations; a function is the
            ``env`` of :class:`.EnvironmentGroups`. Defaults to ``FunctionGroups()``.

    Keyword Args:
        policy (SGLangWrapper): continues conversations, one sample for each. Its
            sampling parameters, log-probs, chat template and keys are used. Plain
            functions need ``input_mode="history"``.
        prompts: a dataset (read by index, epoch after epoch), a ``DataLoader`` or
            another iterable of tasks. A task is a mapping, a TensorDict or a text; its
            values are in each turn of the batch, under their names, which must differ
            from the batch's own columns. Batches of a ``DataLoader`` are taken
            apart: PyTorch's own collate function has made tensors of numbers, and with
            ``collate_fn=list`` the tasks are unchanged. Any other collate function
            returns a list of tasks, or a mapping of columns with one entry for each
            task.
        query_key (str): key of a task's prompt: a text, or messages. Defaults to
            ``"query"``.
        group_size (int): conversations about each task. Defaults to 1.
        groups_per_batch (int): groups of a batch.
        batches_per_update (int): batches that the trainer takes between two weight
            updates. Defaults to 1.
        max_staleness (int): most weight updates between generating a token and taking
            it. A bound, and not the usual value: if training is slower than generation,
            groups start just in time. Defaults to 1.
        on_stale (str): what happens to a complete group with older tokens, when a batch
            is taken: ``"drop"`` (default), ``"retry"`` (its prompt starts again) or
            ``"mask"`` (its older tokens are excluded from the loss: their assistant
            mask is False and their log-probs are NaN).
        on_other_sender (str): what happens when a batch has tokens of a weight version
            from another sender than this collector's, such as another trainer's
            on the same servers: ``"warn"`` (default), once, or ``"raise"``,
            which ends the collector.
        keep_group (callable, optional): gets the returns of a complete group's
            conversations, a list of float, and returns whether the group is trained
            on; it may be a coroutine function. Another prompt takes the place of a
            group that is not. ``has_variance`` drops
            groups that teach nothing, as DAPO's dynamic sampling does
            (https://arxiv.org/abs/2503.14476). After the groups of ten updates in a row
            the collector ends with an error.
        score (callable, optional): gets the rows of a complete group that is trained
            on, a lazy stack, and returns them with further columns; a
            :class:`.Teacher`, for example. It runs in a thread while other groups are
            generated. After a :class:`.ConfigurationError` its group is given up, and
            a :class:`.ServerError` ends the collector.
        total_groups (int): groups to collect; -1 (default) for no end. The last batch
            may be smaller.
        max_in_flight (int, optional): most conversations that run at once. By default
            the bound on staleness is the only limit.
        max_retries (int): how often a group starts again after an error of a function.
            It is given up then, and reported in :meth:`stats`; when eight groups in a
            row are given up, the collector raises their error. A task that cannot be
            collected at all (:class:`.TaskError`) is given up at once. A later turn
            that the chat template refuses ends the collector. Errors of the engine are
            retried for ``timeouts.engine`` seconds. Defaults to 2.
        request_order (str): which requests the servers begin first, where more wait
            than they can run: ``"arrival"`` (default), or ``"oldest"``: requests of
            groups that started first, so that a later turn of an older group does not
            wait behind first turns of newer ones. It needs servers with
            ``enable_priority_scheduling=True`` and
            ``disable_priority_preemption=True``.
        shuffle (bool): read a dataset in random order. Defaults to False.
        seed (int): of that order. Defaults to 0.
        deterministic (bool): two runs collect the same, whatever finishes first: each
            response has a seed of its own, made of ``seed``, the prompt, its place in
            the run and the number of the sample, and a batch has the first groups in
            the order of prompts. It needs ``max_staleness=0``, an engine in
            deterministic mode (or ``temperature=0``), and functions that are a function
            of what they are given. Defaults to False.
        replay_buffer (ReplayBuffer, optional): to write to. If its sampler is a
            ``StalenessAwareSampler``, its ``consumer_version`` follows the updates.
        postproc (callable, optional): applied to each batch; with :meth:`start`, to
            each group.
        weight_sync_schemes (dict, optional): ``{"policy": scheme}``, for
            :meth:`update_policy_weights_`.
        timeouts (CollectorTimeouts, optional): in seconds.
        recorder (RunRecorder, optional): records the life of each group, weight
            updates, servers and batches; or another function of an event of
            :mod:`torchrl_sglang.observer`. Defaults to None.
        **arguments: the short form: arguments of :class:`.FunctionGroups`, such as
            ``rewards``; ``env``; or ``agent`` and ``gateway``.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> policy = SGLangWrapper(engine, generate_kwargs={"max_new_tokens": 4})
        >>> collector = AsyncLLMCollector(
        ...     policy=policy,
        ...     prompts=["1+1=", "2+2="],
        ...     groups=FunctionGroups(rewards=lambda conversation, task: 1.0),
        ...     group_size=4,
        ...     groups_per_batch=2,
        ...     total_groups=2,
        ... )
        >>> for batch in collector:
        ...     print(batch.batch_size, batch["next", "reward"].shape)
        torch.Size([8]) torch.Size([8, 1, 1])
        >>> collector.shutdown()
    """

    @check_arguments(GROUP_ARGUMENTS)
    def __init__(
        self,
        groups: GroupKind | Callable[[], EnvBase] | None = None,
        *,
        policy: SGLangWrapper,
        prompts: Any,
        query_key: str = "query",
        group_size: int = 1,
        groups_per_batch: int,
        batches_per_update: int = 1,
        max_staleness: int = 1,
        on_stale: OnStale = "drop",
        on_other_sender: OnOtherSender = "warn",
        keep_group: KeepGroup | None = None,
        score: ScoresGroup | None = None,
        total_groups: int = -1,
        max_in_flight: int | None = None,
        max_retries: int = 2,
        request_order: RequestOrder = "arrival",
        shuffle: bool = False,
        seed: int = 0,
        deterministic: bool = False,
        replay_buffer: ReplayBuffer | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        weight_sync_schemes: Mapping[str, SGLangWeightSyncScheme] | None = None,
        timeouts: CollectorTimeouts | None = None,
        recorder: Subscriber | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        kind = choose_groups(groups, arguments)
        schemes = check_schemes(weight_sync_schemes)
        check_policy(policy)
        check_request_order(request_order, policy.model.capabilities)
        if score is not None:
            if not callable(score):
                raise ConfigurationError(
                    f"score must be a function of a group's rows, got {score!r}."
                )
            check_call("score", score, "rows")
        self.deterministic = deterministic
        if deterministic:
            check_deterministic(
                policy, max_staleness=max_staleness, of_agents=kind.of_agents
            )
        self.policy = policy
        self.group_size = group_size
        self.groups_per_batch = groups_per_batch
        self.batches_per_update = batches_per_update
        self.replay_buffer = replay_buffer
        self.timeouts = timeouts or CollectorTimeouts()
        self._versions = PolicyVersions(policy.model.weight_version)
        self._prompts = make_prompts(
            prompts,
            query_key=query_key,
            shuffle=shuffle,
            seed=seed,
        )
        self._seeds = SampleSeeds(run=seed)
        has_seeds = deterministic and policy.model.capabilities.uses_seeds
        limits = Limits(
            max_staleness=max_staleness,
            groups_per_update=groups_per_batch * batches_per_update,
        )
        maker = kind.maker(
            GroupSetting(
                policy=policy,
                versions=self._versions,
                size=group_size,
                query_key=query_key,
                timeouts=self.timeouts,
                seeds=self._seeds if has_seeds else None,
                oldest_first=request_order == "oldest",
            )
        )
        self._publish = Publisher(recorder)
        events = GroupEvents(self._publish, policy.tokenizer)
        self._collection = Collection(
            GroupPool(
                limits,
                on_stale=on_stale,
                total=total_groups,
                on_close=self._prompts.done,
                in_order=deterministic,
                on_stale_group=events.stale,
            ),
            self._prompts,
            maker,
            max_in_flight=max_in_flight,
            max_retries=max_retries,
            engine_seconds=self.timeouts.engine,
            keeps=None
            if keep_group is None
            else GroupFilter(keep_group, of_agents=kind.of_agents).keeps,
            score=score,
            asleep=lambda: policy.model.asleep,
            events=events,
        )
        columns = getattr(prompts, "column_names", None)
        if isinstance(columns, list):
            # Of a dataset of Hugging Face's.
            maker.check_columns(columns)
        self._consumer_version = ConsumerVersion(replay_buffer)
        # Rows of agents have the gateway's layout.
        mask = StaleMask() if kind.of_agents else StaleMask.of(policy)
        self._batches = Batches(
            self._collection,
            self._consumer_version,
            mask_stale=mask if on_stale == "mask" else None,
            postproc=postproc,
            replay_buffer=replay_buffer,
            on_other_sender=on_other_sender,
            servers=policy.model.server_url,
        )
        # Nothing that runs refers to this object, so that dropping it ends the rest.
        self._finalizer = weakref.finalize(self, self._collection.stop)
        for scheme in schemes.values():
            attach_weight_sync(self, scheme)
        read = figures_of(self._collection)
        self._publish(CollectorStarted(engine=policy.model, read=read))

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yields batches, or ``None`` for each one that was written to the buffer.

        Raises:
            CollectionTimeoutError: if no batch is complete in time.
            CollectionError: if functions or the engine failed for good.
        """
        if self._batches.writing:
            raise ConfigurationError(
                "The collector writes to its replay buffer in the background; sample "
                "from the buffer instead of iterating."
            )
        self._collection.start()
        while True:
            batch = self._batches.next(
                self.groups_per_batch,
                timeout=self.timeouts.batch,
                on_wait=self._refresh_weights,
            )
            if batch is None:
                return
            yield None if self.replay_buffer is not None else batch

    def __len__(self) -> int:
        """Returns the number of batches.

        Raises:
            TypeError: if ``total_groups`` is -1.
        """
        total = self._collection.pool.total
        if total < 0:
            raise TypeError("A collector without an end has no length.")
        return math.ceil(total / self.groups_per_batch)

    def start(self) -> None:
        """Collects in the background, and writes each complete group to the buffer.

        The trainer is expected to train on ``groups_per_batch * batches_per_update``
        groups of the buffer between two weight updates.

        Raises:
            ConfigurationError: if there is no replay buffer, or the collector is
                deterministic.
        """
        if self.deterministic:
            raise ConfigurationError(
                "start() writes to the replay buffer while the trainer samples from "
                "it, so that what it finds there depends on timing; with "
                "deterministic=True, iterate over the collector."
            )
        if self.replay_buffer is None:
            raise ConfigurationError(
                "start() writes to a replay buffer; give replay_buffer=..., or iterate "
                "over the collector."
            )
        self.check()
        self._collection.start()
        self._batches.write_in_background()

    def check(self) -> None:
        """Raises the error that ended the collector, if one did.

        Raises:
            CollectionError: with that error as its cause.
        """
        self._collection.check()

    def is_running(self) -> bool:
        """Whether conversations are collected in the background."""
        return self._collection.alive

    def pause(self, resume: bool = True) -> Pause:
        """Starts no more groups until :meth:`resume`; those that run go on.

        After :meth:`start`, nothing is written to the replay buffer either, so that a
        state of the collector and one of the buffer that are saved meanwhile belong
        together.

        Args:
            resume: whether the context manager resumes at its end.

        Returns:
            A context manager.

        Raises:
            CollectionTimeoutError: if the buffer does not take a group within ten
                minutes.
        """
        check_flag("resume", resume)
        self._collection.pause()
        return Pause(self._collection.resume if resume else None)

    def resume(self) -> None:
        """Starts groups again."""
        self._collection.resume()

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Ends all conversations and threads. Safe to call twice.

        The scheme's sender forgets the collector: updates are no longer counted.

        Args:
            timeout: for the threads to end, in seconds. Defaults to
                ``timeouts.shutdown``.
            close_env: must be True: environments end with their conversations.
            raise_on_error: raise if a thread does not end in time.

        Raises:
            CollectionTimeoutError: if a thread does not end in time, because a
                function blocks the event loop.
        """
        if not check_flag("close_env", close_env):
            raise ConfigurationError("close_env=False is not supported; leave it out.")
        seconds = self.timeouts.shutdown if timeout is None else timeout
        detach_weight_sync(self)
        self._collection.stop()
        has_ended = self._collection.join(seconds) and self._batches.join(seconds)
        if not has_ended and raise_on_error:
            raise CollectionTimeoutError(
                f"The collector's threads did not end within {seconds:g} s; a function "
                f"blocks them."
            )

    def get_policy_version(self) -> int:
        """Returns the number of weight updates so far."""
        return self._versions.current

    def increment_version(self) -> None:
        """Counts a weight update; the scheme's sender calls it."""
        self.check()
        report = self.last_sync_report
        served = report.version if report is not None and report.version else None
        self._versions.add(served or self.policy.model.weight_version)
        self._set_version()
        self._publish(WeightsUpdated(version=self.policy_version, report=report))

    def _served_next(self, served: str) -> None:
        """Announces the served version of the next update's weights."""
        self._versions.announce(served)

    def _update_failed(self, generated: bool) -> None:
        """Counts an update that failed, if servers had begun to generate with it."""
        self._versions.fail(generated=generated)
        if generated:
            self._set_version()
            self._publish(WeightsUpdated(version=self.policy_version, report=None))

    def _served_again(self, served: str) -> None:
        """Takes another version of the servers for the current weights."""
        self._versions.add_served(served)

    def _set_version(self) -> None:
        version = self._versions.current
        self._collection.set_version(version)
        self._consumer_version.set(version)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Sets the seed of prompts' order and of samples, before the first batch.

        Returns:
            ``seed`` if ``static_seed``, otherwise the next one.

        Raises:
            CollectionError: if the collector has started.
        """
        check_count("seed", seed, least=0)
        if self._collection.alive:
            raise CollectionError("The seed cannot change after the collector started.")
        self._prompts.set_seed(seed)
        self._seeds.run = seed
        return seed if static_seed else seed + 1

    def state_dict(self) -> OrderedDict[str, Any]:
        """Returns the state of the run: prompts that are not done, and versions.

        Save it after training on a batch, in one step with the weights that were sent
        last, the optimizer and the replay buffer; after :meth:`start`, within
        ``with collector.pause():``. Prompts whose groups were not taken by then are
        generated again after :meth:`load_state_dict`, but not if their batches
        were taken, or written to the buffer.
        """
        with self._collection.changed:
            state = self._collection.pool.state_dict()
            prompts = self._prompts.state_dict()
        return OrderedDict(
            pool=state,
            prompts=prompts,
            seed=self._seeds.run,
            frames=self._batches.frames,
            batches=self._batches.batches,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where a state was saved, before the first batch.

        The prompts must be the same, in the same order; the seed is the state's. Send
        the weights that were saved with it to the servers before: they have the
        state's policy version then.

        Raises:
            CollectionError: if the collector has started.
            ConfigurationError: if the prompts are others, or the state is no
                collector's.
        """
        if self._collection.alive:
            raise CollectionError("A state is loaded before the collector is started.")
        pool = self._collection.pool
        with _state_of_a_collector():
            order = state_dict["pool"]["prompts"]
            position, still_open = int(order["next"]), list(order["open"])
            prompts = dict(state_dict["prompts"])
            frames, batches = int(state_dict["frames"]), int(state_dict["batches"])
            seed = int(state_dict["seed"])
        # Reads the user's prompts, which raise any error.
        self._prompts.resume(prompts, position, still_open)
        with _state_of_a_collector():
            pool.load_state_dict(state_dict["pool"])
        self._seeds.run = seed
        self._batches.frames, self._batches.batches = frames, batches
        self._versions.restart(pool.version)
        self._consumer_version.set(pool.version)

    def stats(self) -> dict[str, Any]:
        """Returns statistics of the collector, and its bottleneck.

        Returns:
            ========================= ==================================================
            frames                    turns that were taken
            batches                   batches that were taken
            policy_version            number of weight updates
            groups_running            groups that are not complete
            groups_ready              complete groups that wait to be taken
            groups_stale              groups that were too old
            groups_retried            groups that started again after an error
            groups_failed             groups that were given up
            groups_filtered           groups that ``keep_group`` did not keep
            conversations_in_flight   conversations that wait for the engine now
            conversations_waiting     other conversations: of environments, rewards, or
                                      of a place in ``max_in_flight``
            tokens                    response tokens of complete groups
            tokens_per_second         since the start
            group_seconds             distribution of the time from a group's start to
                                      its end, functions and rewards included
            engine_idle               share of the time without a request in flight
            trainer_waits             share of the time in which a batch is waited for;
                                      0 with :meth:`start`, see ``lately``
            age                       updates -> tokens that were taken at this age
            age_in_flight             the part of it when their group was complete
            age_in_queue              the part that was added until it was taken
            lately                    numbers for a logger, since the trainer got its
                                      last eight batches: ``seconds``,
                                      ``tokens_per_second``, ``trainer_waits``,
                                      ``idle`` (no conversation), ``engine_idle``,
                                      ``conversations``, ``conversations_in_flight``
                                      (means), and ``age``, the mean of the tokens
                                      that were taken
            bottleneck                a sentence on what bounded the run lately
            errors                    recent errors of groups
            ========================= ==================================================
        """
        return {
            "frames": self._batches.frames,
            "batches": self._batches.batches,
            "policy_version": self.policy_version,
            **self._collection.stats(
                " ".join(self.policy.model.problems), self._graphs_up_to()
            ),
        }

    def _graphs_up_to(self) -> int | None:
        engine = self.policy.model
        limit = engine.capabilities.graphs_up_to
        return limit and limit * engine.get_dp_size()

    def __repr__(self) -> str:
        pool = self._collection.pool
        return (
            f"{type(self).__name__}(policy_version={self.policy_version}, "
            f"running={pool.running}, ready={pool.ready}, consumed={pool.consumed})"
        )


COLLECTOR_ARGUMENTS = GROUP_ARGUMENTS.union(
    inspect.signature(AsyncLLMCollector).parameters
) - {"arguments"}
"""Arguments of the collector, and of all kinds of groups."""


@contextmanager
def _state_of_a_collector() -> Iterator[None]:
    """Raises errors of a wrong state as :class:`.ConfigurationError`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"The saved state does not belong to an AsyncLLMCollector "
            f"({type(error).__name__}: {error}); give what its state_dict() returned."
        ) from error
