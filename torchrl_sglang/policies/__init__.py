"""TorchRL's policy on an SGLang engine: TensorDict in, TensorDict out.

Data flows ``inputs`` (prompts to token ids) -> ``engine_call`` (completions) ->
``outputs`` (containers), driven by ``sglang_wrapper``; every mode takes this way.
``sampling`` translates the sampling parameters, and ``turns`` handles single turns for
plain functions. Knows TorchRL, templates through ``chat/``, and the engine through
``backends/contract.py`` only.

Parameters of vLLM are converted by ``sampling.py::_CONVERTED``, or refused by
``sampling.py::_UNSUPPORTED``.
"""
