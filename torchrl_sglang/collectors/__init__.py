"""LLM collectors whose ``update_policy_weights_()`` sends weights to SGLang servers.

``weight_sync.py`` attaches a scheme to any TorchRL collector; ``llm_collector.py`` is
TorchRL's ``LLMCollector`` with the argument ``weight_sync_schemes`` and quick rollouts,
for which ``copies.py`` copies nested TensorDicts.

``async_llm_collector.py`` keeps the engine full while the trainer trains::

    prompts.py --> conversations.py (plain functions) --> groups.py --> batches.py
    prompts.py --> environments.py (TorchRL's) -----------------------> batches.py

``collection.py`` runs them on an event loop of its own, and ``ray_collector.py`` runs
all of it in a Ray actor. All decisions are pure: ``admission.py`` (when a group
starts, which groups make up a batch), ``group_pool.py`` and ``prompt_order.py`` (what
runs, what is done), ``versions.py``, ``stats.py``.
"""
