"""Run: parts that live together, and the steps of a loop over them."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import TensorDictBase
from torchrl import logger as torchrl_logger

from torchrl_sglang.collectors.shared_collector import (
    SharedCollector,
    share_rows,
    share_trees,
)
from torchrl_sglang.collectors.weight_sync import attach_weight_sync
from torchrl_sglang.errors import (
    CheckpointError,
    CollectionError,
    ConfigurationError,
    SGLangError,
)
from torchrl_sglang.objectives.routing import replay_routing
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.support.garbage import old_objects_frozen
from torchrl_sglang.telemetry.figures import StepFigures
from torchrl_sglang.telemetry.server import MetricsEndpoint
from torchrl_sglang.trainers.arguments import RunArguments
from torchrl_sglang.trainers.checkpoints import (
    ROLLOUTS,
    TRAINED,
    Checkpoints,
    forget_later_steps,
    random_state,
    set_random_state,
)
from torchrl_sglang.trainers.collecting import Collecting
from torchrl_sglang.trainers.deterministic import deterministic_algorithms
from torchrl_sglang.trainers.folder_lock import only_run_in
from torchrl_sglang.trainers.learner import Learner
from torchrl_sglang.trainers.loggers import LoggerCalls, end_logger
from torchrl_sglang.trainers.models import save_model, share_tokenizer
from torchrl_sglang.trainers.progress import StepProgress, find_mode, tell
from torchrl_sglang.trainers.rank_scores import RankScores
from torchrl_sglang.trainers.ranks import TrainerRanks, find_trainer_ranks
from torchrl_sglang.trainers.records import Records
from torchrl_sglang.trainers.released_memory import ReleasedMemory, gpu_memory
from torchrl_sglang.trainers.report import (
    PhaseClock,
    Rollouts,
    describe,
    describe_held_out,
    line_of,
    sample_of,
    status_of,
    summarize,
)
from torchrl_sglang.trainers.samples import log_samples, rows_of
from torchrl_sglang.trainers.serving import Served, Serving
from torchrl_sglang.trainers.tasks import ADVANTAGE, taken_column
from torchrl_sglang.trainers.teaching import Teaching
from torchrl_sglang.trainers.training import Training
from torchrl_sglang.types import ServerArgs
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme
from torchrl_sglang.weight_update.transports.process_group import prepare_nccl


class Run:
    """Parts of a run, which begin and end together, and the steps of its loop.

    ``GRPO.train`` is the loop. Under torchrun all ranks call each method.

    Args:
        arguments: all arguments, with their checks.
    """

    ranks: TrainerRanks
    """The processes that train the model together."""
    engine: Any
    """The engine; ``None`` on other ranks than the first."""
    policy: SGLangWrapper | None
    """Wrapper that generates with the engine; ``None`` likewise."""
    gateway: Any
    """Endpoint of an agent; ``None`` without one, and likewise."""
    model: Any
    """Model that is trained."""
    learner: Learner
    """Takes the optimizer steps."""
    scheme: SGLangWeightSyncScheme
    """Sends the weights."""
    hyperparameters: Mapping[str, Any]
    """Arguments in the logger, without keys."""
    collector: Any
    """Iterated over on each rank."""
    collector_here: Any
    """The collector itself; ``None`` on other ranks than the first."""
    logger: Any
    """TorchRL's logger; ``None`` on other ranks."""
    recorder: RunRecorder | None
    """Records the run; ``None`` on other ranks, and without one."""
    clock: PhaseClock
    """Measures the phases of a step."""
    status_seconds: float | None = None
    """Interval between two texts of the progress; None for its mode's interval."""
    metrics_endpoint: MetricsEndpoint | None = None
    """Where Prometheus scrapes this run; ``None`` on other ranks, and unless asked."""
    _checkpoints: Checkpoints
    _rollouts: Rollouts
    _figures: StepFigures | None
    _served: Served
    _score: Any

    def __init__(self, arguments: RunArguments) -> None:
        self.arguments = arguments
        self._collecting = Collecting(arguments)
        self._serving = Serving(arguments, self._collecting.opening())
        self._teaching = Teaching(arguments)
        self._training = Training(arguments, self._teaching.distillation)
        self._records = Records(arguments)
        self.advantage = self._training.make_advantage(
            self._collecting.trajectory_return
        )
        self.folder = self._records.folder
        self.hyperparameters = self._records.hyperparameters
        self.sampling, self.colocated = arguments.sampling, arguments.colocated
        self.query_key, self.steps = arguments.query_key, arguments.total_steps
        self.group_size = arguments.group_size
        self.groups_per_batch = arguments.groups_per_batch
        self.eval_every = arguments.eval_every
        self.checkpoint_every = arguments.checkpoint_every
        self.step = 0
        """Batches that were trained on."""
        self.best: float | None = None
        """Greatest ``eval/reward`` so far."""
        self.metrics: dict[str, float] = {}
        """Of the last step."""
        self.history: list[dict[str, float]] = []
        """Metrics of each step of this process, each with its ``step``; those of step 0
        are of the evaluation before the first one."""
        self._described: dict[str, float] = {}
        self._saved = 0
        self._saved_state: dict[str, Any] | None = None
        self._stack: ExitStack | None = None
        self._progress: StepProgress | None = None
        self._step_began = 0.0
        # Step and phase that the status shows.
        self._doing = (0, "update")

    # The parts.

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            is_part = name in Run.__annotations__
            where = "; it is there within `with run:`, and in train()" * is_part
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{where}",
                name=name,
                obj=self,
            )

    def __enter__(self) -> Self:
        """Makes the parts of the run, starting servers; they end with the block."""
        if self._stack is not None:
            raise ConfigurationError(
                "This run has begun already. Within its `with` block call its steps, "
                "such as `batches()`; `train()` makes and ends such a block itself."
            )
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
        stack.enter_context(_known_warnings_ignored())
        self.recorder = None
        self._log = LoggerCalls()
        self.clock = PhaseClock()
        if self.arguments.deterministic:
            stack.enter_context(deterministic_algorithms())
        torch.manual_seed(self.arguments.seed)
        # Errors are found before servers are started, which takes minutes.
        self._open_records(stack)
        teachers = self._teaching.start(stack, self.ranks)
        served = self.ranks.first(lambda: self._serving.start(stack, self.ranks))
        self._served = served if self.ranks.is_first else Served()
        self.engine, self.policy = self._served.engine, self._served.policy
        self.gateway = self._served.gateway
        tokenizer = share_tokenizer(self.policy, self.ranks)
        # Ranks share the model by a communicator of their own.
        prepare_nccl(ServerArgs(**self.ranks.first(self._settings_for_nccl)))
        self.model = self._training.load(self.ranks)
        device = next(self.model.parameters()).device
        self._released = ReleasedMemory(self.ranks, gpu_memory(device))
        reference = self._training.make_reference(self.model, self.ranks)
        if self._serving.token_columns:
            stack.enter_context(replay_routing(self.model))
        teacher = self._teaching.make(teachers, self._served, self.ranks)
        self._score = teacher if self._teaching.scores_groups else None
        self.learner = self._training.make_learner(
            self.model, tokenizer, self.ranks, reference=reference, teacher=teacher
        )
        self.learner.recorder = self._recorder_of_scores()
        self.learner.on_taught = lambda: self.clock.done("score")
        self.learner.query_key = self.query_key
        self.scheme = SGLangWeightSyncScheme(
            self.engine, self.model, **(self.arguments.weight_sync or {})
        )
        stack.callback(self.scheme.shutdown)
        self._make_collector()
        stack.callback(self.collector.shutdown)
        self._figures = self._progress = None
        self.ranks.first(lambda: self._open_metrics(stack))
        stack.enter_context(old_objects_frozen())

    def _settings_for_nccl(self) -> dict[str, Any]:
        args = self.engine.capabilities.args
        return {"device": args.device, "enable_symm_mem": args.enable_symm_mem}

    def _open_metrics(self, stack: ExitStack) -> None:
        """Reads statistics of the parts from now on, for logger and Prometheus."""
        parts: dict[str, Any] = {
            "engine": self.engine,
            "collector": self.collector_here,
            "gateway": self.gateway,
        }
        # Parts can be the user's, without statistics.
        parts = {name: part for name, part in parts.items() if hasattr(part, "stats")}
        parts["scheme"] = self.scheme
        self._figures = StepFigures(**parts)
        endpoint = self._records.serve_metrics(**parts)
        if endpoint is not None:
            self.metrics_endpoint = stack.enter_context(endpoint)
            tell(f"Metrics for Prometheus are at {endpoint.url}")

    def _open_records(self, stack: ExitStack) -> None:
        """Checks the run's folder and opens its files."""
        self.logger = None
        self._checkpoints = self._records.make_checkpoints(self.ranks)
        stack.callback(self._checkpoints.close)

        def open_files() -> None:
            stack.enter_context(only_run_in(self.folder))
            self._saved_state = self._checkpoints.load(self.arguments.resume)
            self.logger = self._records.open_logger(self._saved_state)
            if isinstance(self.arguments.logger, str):
                stack.callback(end_logger, self.logger)
            self.recorder = self._records.open_recorder()
            if self.recorder is None:
                return
            model = {"model": self._records.identity["model"]}
            self.recorder.log_hparams({**model, **self.hyperparameters})
            if self.arguments.recorder is True:
                stack.callback(self.recorder.close)

        self.ranks.first(open_files)

    def _recorder_of_scores(self) -> RunRecorder | RankScores | None:
        """Returns the recorder of the log-probs of this rank's learner."""
        if self.ranks.size == 1:
            return self.recorder
        if not self.ranks.share(self.recorder is not None):
            return None
        return RankScores(recorder=self.recorder, ranks=self.ranks)

    def _make_collector(self) -> None:
        if self.ranks.size == 1:
            self.collector = self.collector_here = self._make_here()
            attach_weight_sync(self.collector, self.scheme)
            return
        self.collector = SharedCollector(
            self._make_here,
            weight_sync_schemes={"policy": self.scheme},
            prepare=self._prepare,
            share=share_trees if self.arguments.packing == "tree" else share_rows,
        )
        self.collector_here = self.collector.collector

    def _make_here(self) -> Any:
        return self._collecting.make(self._served, self.recorder, self._score)

    # The steps of the loop.

    def begin(self) -> None:
        """Goes on with a checkpoint, if there is one, and sends the weights."""
        state = self._saved_state
        goes_on = self.ranks.share(state is not None)
        collected = (state or {}).get("collector", {})
        # They can be of a run of this object that was interrupted.
        self.step, self.best, self.metrics, self._described = 0, None, {}, {}
        if goes_on:
            self._checkpoints.restore(self.learner)
            if wrong := self.learner.find_not_finite(of_optimizer=True):
                raise CheckpointError(
                    f"{wrong} of the newest checkpoint in {self.folder} is not finite, "
                    f"and nothing was sent to servers. Remove the checkpoint to go on "
                    f"with the one before."
                )
            self.step = self.ranks.share(0 if state is None else state["step"])
            self.best = self.ranks.share(None if state is None else state["best"])
            # What does not fit is found before servers have the weights; their version
            # equals a new collector's all the same.
            fresh = self.collector.state_dict()
            self.collector.load_state_dict(collected)
            self.collector.load_state_dict(fresh)
        self._doing = self.step, "update"
        self._show_progress()
        self.update_weights()
        if goes_on:
            # The servers hold the weights of the state's policy version.
            self.collector.load_state_dict(collected)
            # More ranks than were saved have random numbers of their own.
            random: Any = self.ranks.share(None if state is None else state["random"])
            for state_here in random[self.ranks.rank :][:1]:
                set_random_state(state_here)
        # A run that begins reports step 0 itself.
        newest = self.step if goes_on else -1
        self.history = [step for step in self.history if step["step"] <= newest]
        self._saved, self._saved_state = self.step, None
        if self.ranks.is_first:
            rollouts = self.folder / ROLLOUTS
            forget_later_steps(self.folder, newest)
            self._rollouts = Rollouts(rollouts)
            assert self._stack is not None
            self._stack.callback(self._rollouts.close)
            if goes_on:
                tell(f"goes on after step {self.step}")
        if self.recorder is not None:
            self.recorder.event("step", step=self.step)
        if self.step == 0:
            self.report(self.evaluate())
        self.clock = PhaseClock(self.recorder)

    def _show_progress(self) -> None:
        """Shows how far the run is, until its block ends."""
        assert self._stack is not None
        mode = find_mode(self.arguments.progress, is_first=self.ranks.is_first)
        self._step_began = time.monotonic()
        progress = StepProgress(
            mode, self.steps, self.step, self._status, seconds=self.status_seconds
        )
        self._progress = self._stack.enter_context(progress)

    def _status(self) -> str:
        """Returns the progress of the present step; called in another thread."""
        stats: Any = getattr(self.collector_here, "stats", dict)()
        step, phase = self._doing
        return status_of(step, phase, time.monotonic() - self._step_began, stats)

    def _begin_phase(self, phase: str) -> None:
        """Begins another phase of the step that the status shows."""
        self._doing = self._doing[0], phase

    def batches(self) -> Iterator[TensorDictBase]:
        """Yields this rank's share of each batch, with advantages, until all steps are.

        A collector of the user's own may have more, so that ``step`` counts.
        """
        prepared = map(self._prepare, self.collector)
        shares = iter(prepared if self.ranks.size == 1 else self.collector)
        while self.steps is None or self.step < self.steps:
            self._doing = self.step + 1, "collect"
            batch = next(shares, None)
            if batch is None:
                return
            self.clock.done("collect")
            if self._teaching.teachers and not self._teaching.sleeps:
                self._begin_phase("score")
                batch = self.learner.score(batch)
                self.clock.done("score")
            self._begin_phase("train")
            yield batch

    def _prepare(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds advantages to a whole batch, and describes it, on the first rank."""
        if ADVANTAGE in batch.keys():
            raise taken_column("A task")
        self._collecting.check_batch(batch)
        batch = self.advantage(batch)
        self._described = describe(
            batch,
            policy_version=self.collector_here.policy_version,
            group_size=self.group_size,
            max_tokens=self._max_tokens,
            trajectory_return=self._collecting.trajectory_return,
        )
        self._rollouts.write(self.step + 1, batch, self.query_key)
        if self.recorder is not None:
            self.recorder.trained(batch, step=self.step + 1)
        every = self.arguments.show_samples
        if every is not None and self.step % every == 0:
            tell(sample_of(batch, self.query_key))
            rows = list(rows_of(self.step + 1, batch, self.query_key))
            if self.logger is not None:
                self._log(log_samples, self.logger, rows, step=self.step + 1)
        return batch

    def update_weights(self) -> None:
        """Sends the weights to the servers, which generate with them from now on."""
        self._begin_phase("update")
        with _updates_not_logged():
            self.collector.update_policy_weights_()
        if self.colocated:
            engine = self.engine
            share = engine and engine.capabilities.args.mem_fraction_static
            self._released.check(share)
        if self.engine is not None:
            self.engine.wake_up()

    @contextmanager
    def memory_for_training(self) -> Iterator[None]:
        """Has servers on the trainer's GPUs release their memory meanwhile."""
        if not self.colocated:
            yield
            return
        # An adapter is loaded beside base weights, which nothing would bring back.
        adapts = self.arguments.lora is not None
        memory = "kv_cache" if adapts else ("weights", "kv_cache")
        self._begin_phase("sleep")
        with self._released.counting():
            self.ranks.first(lambda: self.engine and self.engine.sleep(memory))
        self.clock.done("sleep")
        self._begin_phase("train")
        try:
            yield
        except BaseException:
            # The servers may be the user's. Other ranks do not come here.
            if self.engine is not None:
                with suppress(SGLangError):
                    self.engine.wake_up()
            raise
        self.clock.done("train")
        self._begin_phase("sleep")
        with self._released.counting():
            self.ranks.first(lambda: self.engine and self.engine.wake_up("weights"))
        self.clock.done("sleep")

    @property
    def _max_tokens(self) -> int | None:
        """Longest response of a row; None for an agent, whose rows may have several."""
        has_agent = self.arguments.agent is not None
        return None if has_agent else self.sampling["max_new_tokens"]

    def is_due(self, every: int) -> bool:
        """Returns whether a step is one of every so many."""
        return self.step % every == 0

    def evaluate(self) -> dict[str, float]:
        """Returns the mean rewards of held-out prompts, greedily; keeps the best model.

        The engine generates, with the weights that it has.
        """
        if self._collecting.eval_prompts is None:
            return {}
        self._begin_phase("evaluate")
        metrics = self.ranks.first(self._evaluate)
        reward = metrics["eval/reward"]
        if self.step and (self.best is None or reward > self.best):
            save_model(self.model, self.policy, self.folder / "best", self.ranks)
        if self.best is None or reward > self.best:
            self.best = reward
        self.clock.done("evaluate")
        return metrics if self.ranks.is_first else {}

    def _evaluate(self) -> dict[str, float]:
        collector = self._collecting.make_held_out(
            self._served, self.sampling, self.recorder
        )
        with collector:
            batch, stats = next(iter(collector), None), collector.stats()
        prompts, errors = self._collecting.eval_prompts or (), stats["errors"]
        scored = len(prompts) - stats["groups_failed"]
        reason = f" The last error was: {errors[-1]}" if errors else ""
        if batch is None:
            raise CollectionError(
                f"None of {len(prompts)} held-out prompts could be scored.{reason}"
            )
        if scored < len(prompts):
            tell(f"{scored} of {len(prompts)} held-out prompts were scored.{reason}")
        metrics = describe_held_out(
            batch,
            policy_version=collector.policy_version,
            max_tokens=self._max_tokens,
            trajectory_return=self._collecting.trajectory_return,
        )
        return {"eval/prompts": float(scored), **metrics}

    def report(self, metrics: dict[str, float]) -> None:
        """Logs the metrics of a step, and prints a line."""
        seconds = self.clock.take()
        if not self.ranks.is_first or not (metrics or self.step):
            return
        figures = {} if self._figures is None else self._figures.read()
        metrics = {**figures, **self._described, **metrics, **seconds}
        spent = sum(seconds.values())
        if "batch/tokens" in metrics and spent:
            metrics["time/tokens_per_second"] = metrics["batch/tokens"] / spent
        if self.logger is not None:
            self._log(self.logger.log_metrics, metrics, step=self.step)
        if self.recorder is not None:
            self.recorder.log(metrics, step=self.step)
        self.metrics = metrics
        self.history.append({"step": self.step, **metrics})
        line = line_of(self.step, self.steps, metrics)
        self._step_began = time.monotonic()
        if self._progress is None:
            tell(line)
        else:
            self._progress.advance(self.step, line)

    def save(self) -> None:
        """Saves a checkpoint, which is written meanwhile; all ranks call it."""
        self._begin_phase("save")
        random = self.ranks.gather(random_state())
        extra: dict[str, Any] = {}
        if self.ranks.is_first:
            extra = {
                "collector": self.collector.state_dict(),
                "random": random,
                "best": self.best,
                "logger": self._records.state_of(self.logger),
            }
        self._checkpoints.save(self.step, self.learner, extra)
        self._saved = self.step
        self.clock.done("save")

    def finish(self) -> Path:
        """Saves the trained model and returns its folder; all ranks call it."""
        if self._saved != self.step:
            self.save()
        self._begin_phase("save")
        # A trained model without a checkpoint would be nothing to go on with.
        self._checkpoints.wait()
        folder = self.folder / TRAINED
        save_model(self.model, self.policy, folder, self.ranks)
        if self.ranks.is_first:
            tell(f"{self.step} steps. The model is in {folder}.{self._bound()}")
        return folder

    def _bound(self) -> str:
        """Returns a sentence with the bottleneck of the run, if it had any steps."""
        if not any(self.clock.totals.values()):
            return ""
        stats: Any = getattr(self.collector_here, "stats", dict)()
        in_turn = self._collecting.takes_turns
        sentence = summarize(
            self.clock.totals, stats.get("bottleneck"), in_turn=in_turn
        )
        return f" {sentence}"


@contextmanager
def _updates_not_logged() -> Iterator[None]:
    """Leaves out the log of a weight update, which the line of a step has.

    A level below INFO was set by the user, who gets everything.
    """
    level = torchrl_logger.level
    if level == logging.INFO:
        torchrl_logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        torchrl_logger.setLevel(level)


@contextmanager
def _known_warnings_ignored() -> Iterator[None]:
    """Ignores warnings of TorchRL and PyTorch that no user of a run can act on."""
    with warnings.catch_warnings():
        for text in (
            # TorchRL's, about its own use of PyTorch.
            "size_average and reduce args",
            # PyTorch's, about checkpoints of a single process.
            "torch.distributed is disabled, unavailable or uninitialized",
        ):
            warnings.filterwarnings("ignore", text, UserWarning)
        yield
