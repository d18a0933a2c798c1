"""The engine: processes and HTTP. Knows no TensorDict and no torch.distributed.

What users hold
    ``async_sglang`` (composes the rest), ``base`` (the contract of other rooms).
From a call to an answer
    ``batch`` (checks), ``generation`` (order, weights' versions), ``data_plane``
    (sending), ``retries``, ``wire`` (SGLang's protocol), ``log_probs`` (what servers
    give, and what has to be scored), ``stats``.
LoRA adapters
    ``adapters`` (loading, replacing, who uses which), ``adapter_payload`` (checks).
Which servers there are
    ``fleet`` (who gets requests), ``supervisor`` (starts them again), ``following``
    (asks those of somebody else what they have), ``hanging`` (or only paused),
    ``control_plane`` (calls to each of them), ``memory`` (sleep and wake-up),
    ``capabilities``, ``snapshots`` (checkpoints that we wrote), ``metadata``.
Starting them
    ``launching`` (servers and router), ``replicas`` and ``devices`` (what differs
    between servers), ``server`` (order of a start), ``plan`` (what is to be run),
    ``environment`` (what of the trainer's is inherited), ``command``,
    ``vllm_arguments`` and ``server_flags`` (arguments), ``ports``, ``process``,
    ``watchdog``, ``router`` and ``router_launch``, ``cpu``.
Underneath
    ``event_loop``, ``http``, ``addresses``, ``open_files``,
    ``checks`` (of arguments).
"""
