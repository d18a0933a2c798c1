"""LLM collectors whose ``update_policy_weights_()`` sends weights to SGLang servers.

``weight_sync.py`` attaches a scheme to any TorchRL collector; ``llm_collector.py`` is
TorchRL's ``LLMCollector`` with the argument ``weight_sync_schemes`` and quick rollouts,
for which ``copies.py`` copies nested TensorDicts.

``async_llm_collector.py`` keeps the engine full while the trainer trains, and
``ray_collector.py`` runs all of it in a Ray actor. ``shared_collector.py`` shares
batches among the ranks of a trainer; between processes they are bytes, by
``packed_rows.py``. The asynchronous collector is made of three folders::

    scheduling/ (pure: which group starts, which groups make up a batch)
        |
    runtime/    (an event loop that runs them, and hands batches to the trainer)
        |
    groups/     (the conversations of a group: of functions, agents, environments)

A method of the asynchronous collector is in ``base.py::GroupCollector`` if it needs no
collection, and otherwise has a line with ``ray_collector.py::_forwarded``.
"""
