"""One rank of a trainer, run by ``test_ranks.py``: does what it is told, and answers.

Each line of the input is a JSON list: the name of a function below, and its keyword
arguments. Each line of the output is what it returned, or the error that it raised.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from helpers.log_probs import difference as log_prob_difference
from helpers.weights import open_weights

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    get_model_metadata,
)
from torchrl_sglang.backends.client.model_info import (
    fused_from_config,
    metadata_from_config,
)
from torchrl_sglang.errors import (
    ServerTimeoutError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.support.event_loop import run_sync, submit
from torchrl_sglang.testing.tiny_model import make_tiny_model
from torchrl_sglang.weight_update.ranks import Ranks
from torchrl_sglang.weight_update.sources.resolve import find_source
from torchrl_sglang.weight_update.transports import cuda_ipc, handle_ranks
from torchrl_sglang.weight_update.transports.cuda_ipc import CudaIpcTransport

NOBODY = "http://127.0.0.1:1"
"""Where no server answers: ranks that do not send must not mind."""

RANK, WORLD_SIZE = int(sys.argv[1]), int(sys.argv[2])
STORE, SERVER, MODEL = sys.argv[3:6]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


def make_sender(server: str = SERVER, **arguments: Any) -> Any:
    url = server if RANK == 0 else NOBODY
    return SGLangWeightSyncScheme(url, **arguments).create_sender()


def make_model(seed: int, **arguments: Any) -> Any:
    return make_tiny_model(TOKENIZER, seed=seed, **arguments)


def shard(model: Any, shape: tuple[int, ...] = (2,), **arguments: Any) -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **arguments)
    return fully_shard(model, mesh=mesh, **arguments)


def whole_copy(model: Any) -> Any:
    """The sharded model as PyTorch gathers it, in float32; on every rank."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in state.items():
        # PyTorch gives it to the first rank, and an empty one to the others.
        whole = value.float() if RANK == 0 else value
        state[name] = whole
    if RANK != 0:
        return None
    other = make_model(0)
    other.load_state_dict(state)
    return other


def difference(model: Any) -> float | None:
    """Greatest difference of the engine's log-probs from a model's."""
    if RANK != 0:
        return None
    with AsyncSGLang.connect(SERVER) as engine:
        return log_prob_difference(engine, model)


def told(report: Any) -> dict[str, Any]:
    return {
        "version": report.version,
        "transport": report.transport,
        "tensors": report.num_tensors,
        "buckets": report.num_buckets,
    }


class Watch:
    """Bytes of whole tensors that were alive at once, as PyTorch gathers them."""

    def __init__(self, at: int | None = None, then: Any = None) -> None:
        self.most = self.gathered = 0
        self._at, self._then = at, then
        self._alive: list[tuple[StorageWeakRef, int]] = []

    def __enter__(self) -> Watch:
        self._full_tensor = full_tensor = DTensor.full_tensor

        def watched(tensor: Any, **arguments: Any) -> torch.Tensor:
            whole = full_tensor(tensor, **arguments)
            storage = whole.untyped_storage()
            self._alive = [each for each in self._alive if not each[0].expired()]
            self._alive.append((StorageWeakRef(storage), storage.nbytes()))
            self.most = max(self.most, sum(size for _, size in self._alive))
            self.gathered += 1
            if self.gathered == self._at:
                self._then()
            return whole

        DTensor.full_tensor = watched
        return self

    def __exit__(self, *_: object) -> None:
        DTensor.full_tensor = self._full_tensor


def sharded(seed: int, kind: str, bucket_bytes: int) -> dict[str, Any]:
    model = make_model(seed)
    if kind == "half":
        model = model.bfloat16()
    if kind == "offloaded":
        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    elif kind == "mixed":
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        policy = {"mp_policy": half}
    else:
        policy = {}
    shard(model, (2, 1) if kind == "replicated" else (2,), **policy)
    # What a step of training leaves behind is what is sent.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(1, 9)[None]).logits.float().square().mean().backward()
    optimizer.step()
    expected = whole_copy(model)
    sender = make_sender(bucket_bytes=bucket_bytes)
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model))
    weights = {
        "state dict": model.state_dict,
        "exporter": lambda: lambda: iter(model.state_dict().items()),
    }.get(kind, lambda: None)()
    with Watch() as watch:
        report = sender.update_weights(weights)
    sender.shutdown()
    return {
        "report": told(report),
        "difference": difference(expected),
        "most": watch.most,
        "gathered": watch.gathered,
    }


def sharded_adapters(seed: int) -> dict[str, Any]:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "lm_head"])
    torch.manual_seed(seed)
    model = peft.get_peft_model(make_model(seed), config)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.1)
    merged = copy.deepcopy(model).merge_and_unload()
    shard(model.base_model.model)
    sender = make_sender(bucket_bytes=70_000)
    with Watch() as watch:
        report = sender.update_weights(model)
    sender.shutdown()
    return {
        "report": told(report),
        "difference": difference(merged),
        "gathered": watch.gathered,
    }


def refused(seed: int, reason: str) -> dict[str, Any]:
    """An update that fails on the first rank, and one with the same sender after it."""
    model = shard(make_model(seed))
    expected = whole_copy(model)
    sender = make_sender(bucket_bytes=70_000)
    errors = []

    def fails(weights: Any, watch: Watch) -> None:
        start = time.monotonic()
        try:
            with watch:
                sender.update_weights(weights)
        except Exception as error:
            errors.append(
                {
                    "type": type(error).__name__,
                    "text": str(error),
                    "untouched": getattr(error, "untouched", None),
                    "seconds": time.monotonic() - start,
                    "gathered": watch.gathered,
                }
            )

    def leave() -> None:
        # The servers leave the group, as they do when their process ends.
        if RANK == 0:
            engine, name = sender._scheme.engine, sender.transport.group_name
            run_sync(engine.control.destroy_weights_update_group(name))

    if reason == "mismatch":
        fails(shard(make_model(seed, hidden_size=128)), Watch())
    elif reason == "half way":
        fails(model, Watch(at=10, then=leave))
    elif reason == "locked":
        with sender._scheme.engine.weight_update() if RANK == 0 else nullcontext():
            fails(model, Watch())
    else:
        other = shard(make_model(seed, intermediate_size=128))
        fails(model if RANK == 0 else other, Watch())
    report = sender.update_weights(model)
    sender.shutdown()
    return {
        "errors": errors,
        "report": told(report),
        "difference": difference(expected),
    }


def by_handles(seed: int, reason: str = "") -> dict[str, Any]:
    """The server gets what the second rank has packed; CPUs have values for handles."""
    model = shard(make_model(seed))
    expected = whole_copy(model)
    connect, pack = CudaIpcTransport.connect, handle_ranks.pack
    packed = []

    def near_the_second_rank(transport: Any) -> None:
        connect(transport)
        transport.owners = (1,)

    def counted(value: Any) -> Any:
        packed.append(value)
        if len(packed) == 3 and reason == "no handle":
            raise MemoryError("no memory for a handle")
        if len(packed) == 3 and reason == "dies":
            os._exit(1)
        return pack(value)

    def refuses(*arguments: Any) -> Any:
        packed.append(arguments)
        if len(packed) == 3 and reason == "refused":
            raise ServerTimeoutError("The server does not answer.")
        return submit(*arguments)

    sender = make_sender(transport="cuda_ipc", bucket_bytes=140_000)
    failed = ""
    CudaIpcTransport.connect, handle_ranks.pack = near_the_second_rank, counted
    cuda_ipc.submit = refuses
    try:
        if reason:
            try:
                sender.update_weights(model)
            except WeightTransferError as error:
                failed = str(error)
            packed.clear()
            reason = ""
        with Watch() as watch:
            report = sender.update_weights(model)
    finally:
        CudaIpcTransport.connect, handle_ranks.pack = connect, pack
        cuda_ipc.submit = submit
    sender.shutdown()
    return {
        "report": told(report),
        "difference": difference(expected),
        "failed": failed,
        "packed": len(packed),
        "most": watch.most,
    }


def no_server(seed: int) -> None:
    make_sender(NOBODY).update_weights(shard(make_model(seed)))


def other_error() -> None:
    def send(source: Any) -> Any:
        raise ZeroDivisionError("nobody expected this")

    source = find_source(shard(make_model(0)))
    Ranks([dist.group.WORLD]).update(source, send)


def copies(seed: int) -> dict[str, Any]:
    model = DistributedDataParallel(make_model(seed))
    sender = make_sender()
    sender.register_model(model)
    sender.init_all_workers_group()
    report = sender.update_weights()
    sender.shutdown()
    return {"report": told(report), "difference": difference(model.module)}


def copies_with_collectors(seed: int) -> str:
    """Returns what this rank's update of its collector says."""
    with AsyncSGLang.connect(SERVER) as engine:
        scheme = SGLangWeightSyncScheme(
            engine, DistributedDataParallel(make_model(seed))
        )
        collector = AsyncLLMCollector(
            policy=SGLangWrapper(engine),
            prompts=["1+1="],
            rewards=lambda conversation, task: 0.0,
            group_size=2,
            groups_per_batch=1,
            weight_sync_schemes={"policy": scheme},
        )
        try:
            return told(collector.update_policy_weights_())["transport"]
        except WeightSyncStateError as error:
            return str(error)
        finally:
            dist.barrier()
            collector.shutdown()
            scheme.shutdown()


def alone(seed: int) -> dict[str, Any] | None:
    """A model of one rank concerns no other one, whatever process groups there are."""
    if RANK != 0:
        return None
    model = make_model(seed)
    sender = make_sender()
    report = sender.update_weights(model)
    sender.shutdown()
    return {"report": told(report), "difference": difference(model)}


def sharded_experts() -> dict[str, Any]:
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=3,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    served, fused = metadata_from_config(config, None), fused_from_config(config)
    expected = dict(open_weights(model, served, fused).read())
    expected = {name: value.clone() for name, value in expected.items()}
    found = dict(open_weights(shard(model), served, fused).read())
    return {
        "names": len(found),
        "served": found.keys() == served.keys(),
        "same": all(torch.equal(found[name], expected[name]) for name in expected),
    }


def exported_together(seed: int) -> dict[str, Any]:
    """An exporter that runs collectives of its own, as bridges from Megatron do."""
    model = make_model(seed)
    group, exports = dist.new_group([0, 1]), []

    def export():
        exports.append(True)
        for name, value in model.state_dict().items():
            # Each rank brings one half of the sum.
            whole = value * (0.25 if RANK == 0 else 0.75)
            dist.all_reduce(whole)
            yield name, whole

    sender = make_sender(process_group=group, bucket_bytes=70_000)
    sender.register_model(export)
    for _ in range(2):
        report = sender.update_weights()
    sender.shutdown()
    return {
        "report": told(report),
        "difference": difference(model),
        "exports": len(exports),
    }


def older_sharding() -> None:
    model = FullyShardedDataParallel(make_model(0), device_id=torch.device("cpu"))
    make_sender().update_weights(model)


def waits_for_nobody(seed: int) -> None:
    """The first rank is gone by now, or will be soon."""
    model = shard(make_model(seed))
    dist.barrier()
    if RANK == 0:
        os._exit(1)
    make_sender().update_weights(model)


def main() -> None:
    # What libraries print does not belong into the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{STORE}",
        rank=RANK,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    print(json.dumps({"value": "ready"}), file=answers)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        start = time.monotonic()
        try:
            answer = {"value": globals()[name](**arguments)}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        answer["seconds"] = time.monotonic() - start
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
