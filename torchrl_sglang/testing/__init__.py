"""Things to test with: for users of the package as well as for its own tests.

Nothing in here downloads anything or needs an accelerator. ``tiny_model`` builds a
small causal language model with its tokenizer and writes both as Hugging Face files;
``forked_starts`` makes starts of servers on CPU quick.
"""
