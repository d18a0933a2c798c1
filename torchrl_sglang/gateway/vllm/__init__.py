"""vLLM's server for reinforcement learning, in front of SGLang.

``dialect`` reads requests, ``answers`` writes responses, ``controls`` has the calls for
pauses, sleep, adapters and weight updates, whose phases are in ``update``.

Source: vLLM 0.31, ``vllm/entrypoints/scale_out/token_in_token_out``,
``vllm/entrypoints/serve/dev`` and ``vllm/distributed/weight_transfer``.
"""
