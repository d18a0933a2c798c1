"""Helpers for tests, for users of the package and for its own tests.

``tiny_model`` builds a small causal language model with its tokenizer, ``faults`` is a
proxy that breaks requests. Nothing is downloaded, and no accelerator is needed.
"""
