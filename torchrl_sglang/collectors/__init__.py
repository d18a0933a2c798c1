"""LLM collectors whose ``update_policy_weights_()`` sends weights to SGLang servers.

``weight_sync.py`` attaches a scheme to any TorchRL collector; ``llm_collector.py`` is
TorchRL's ``LLMCollector`` with the argument ``weight_sync_schemes``.
"""
