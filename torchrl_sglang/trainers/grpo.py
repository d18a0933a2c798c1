"""GRPO: a training run in one call, and its loop.

:meth:`GRPO.train` is the loop. It is short, and made of public parts, so that it can be
copied and changed: the engine, the policy, the collector, the :class:`.Learner` and the
weight-sync scheme are attributes of the run, and its steps are methods of ``run.Run``.
"""

from __future__ import annotations

from pathlib import Path

from torchrl_sglang.support.checks import refuse_unknown
from torchrl_sglang.support.fields import from_fields, with_arguments
from torchrl_sglang.trainers.arguments import RunArguments
from torchrl_sglang.trainers.run import Run


class GRPO(Run):
    """A GRPO run: prompts and rewards in, a trained model in a folder out.

    Synchronous (``max_staleness=0``), colocated (the servers sleep on the trainer's
    GPUs while it trains) or asynchronous; all weights or a LoRA adapter; one process,
    or as many as torchrun starts, which share the model with FSDP2 and each batch.

    A part that is made here has its arguments in a mapping, and can be given as an
    object instead: ``engine={"num_replicas": 4}`` or ``engine=my_engine``. All
    arguments are fields of ``trainers.arguments.RunArguments``.

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
    @from_fields(RunArguments)
    def __init__(self, arguments: RunArguments) -> None:
        super().__init__(arguments)

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


GRPO.__doc__ = with_arguments(GRPO.__doc__, RunArguments)
