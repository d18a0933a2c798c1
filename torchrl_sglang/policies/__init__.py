"""TorchRL's policy on an SGLang engine: TensorDict in, TensorDict out.

Data flows ``inputs`` (prompts to token ids) -> ``engine_call`` (completions) ->
``outputs`` (containers), driven by ``sglang_wrapper``; every mode takes this way.
``sampling`` translates the sampling parameters. Knows TorchRL and tokenizers, and the
engine through ``backends/contract.py`` only.
"""
