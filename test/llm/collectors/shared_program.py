"""One rank of a trainer, run by ``test_shared_collector.py``, which says what it does.

What it found is a line of JSON at the end of its output.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict, lazy_stack, set_list_to_stack
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens
from torchrl.objectives.llm import GRPOLoss
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    CorrectedGRPOLoss,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    SharedCollector,
)
from torchrl_sglang.collectors.shared_collector import share_rows
from torchrl_sglang.errors import SGLangError
from torchrl_sglang.objectives.parts import LossRanks, own_gradients
from torchrl_sglang.testing.tiny_model import make_tiny_model

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])
STORE, SERVER, MODEL, TASK = sys.argv[3:7]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


def make_rows(count: int) -> list[TensorDict]:
    """Ragged responses, some of whose log-probs are not known."""
    generator = torch.Generator().manual_seed(7)

    def integers(low: int, high: int, size: int) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    rows = []
    for _ in range(count):
        prompt, length = integers(1, 9, 1).item(), integers(1, 40, 1).item()
        tokens = integers(3, 90, prompt + length)
        log_probs = torch.randn(length, generator=generator).sub(4).clamp(max=-0.01)
        log_probs[integers(0, length, 1)] = torch.nan
        mask = torch.arange(prompt + length) >= prompt
        before = torch.full((prompt,), torch.nan)
        rows.append(
            TensorDict(
                tokens=Tokens(
                    prompt=tokens[:prompt], response=tokens[prompt:], full=tokens
                ),
                masks=Masks(
                    all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask
                ),
                log_probs=LogProbs(
                    response=log_probs, full=torch.cat([before, log_probs])
                ),
                advantage=torch.randn(1, 1, generator=generator),
            )
        )
    return rows


def make_loss(model: Any, cls: Any = CorrectedGRPOLoss) -> Any:
    actor = TransformersWrapper(
        model, tokenizer=TOKENIZER, input_mode="tokens", generate=False
    )
    # Averages of TorchRL's entropy count padding.
    return cls(
        actor,
        clip_epsilon=(0.99, 99.0),
        masking_strategy="rlhf",
        entropy_bonus=False,
    )


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return {name: grad.clone() for name, grad in found.items()}


def difference_of_some_gradients() -> dict[str, float]:
    """A diagonal of the matrix."""
    return difference_of_gradients(every=False)


def difference_of_gradients(every: bool = True) -> dict[str, float]:
    """For each number of ranks and parts, how far the gradient is from TorchRL's."""
    rows = make_rows(64)
    model = make_tiny_model(TOKENIZER, seed=1).double()
    make_loss(model, GRPOLoss)(lazy_stack(rows)).loss_objective.backward()
    wanted = gradients(model)
    scale = max(float(each.abs().max()) for each in wanted.values())
    found = {}
    numbers = (1, 5, 16)
    for place, size in enumerate((2, 4)):
        group = dist.new_group(list(range(size)))
        if size <= RANK:
            continue
        own = lazy_stack(share_rows(rows, size)[RANK])
        for shift, kind in enumerate(("sharded", "parallel", "copies"), place):
            for most in numbers if every else (numbers[shift % 3],):
                model = make_tiny_model(TOKENIZER, seed=1).double()
                if kind == "sharded":
                    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("s",))
                    for layer in model.model.layers:
                        fully_shard(layer, mesh=mesh)
                    fully_shard(model, mesh=mesh)
                elif kind == "parallel":
                    model = DistributedDataParallel(model, process_group=group)
                    model.config = model.module.config
                loss = make_loss(model)
                assert loss.packs
                output = loss.accumulate(own.split(most), process_group=group)
                inner = model.module if kind == "parallel" else model
                worst = max(
                    float((each - wanted[name]).abs().max())
                    for name, each in gradients(inner).items()
                )
                found[f"{kind} {size} {most}"] = worst / scale
                values = [torch.zeros((), dtype=torch.float64) for _ in range(size)]
                dist.all_gather(values, output.loss_objective.double(), group=group)
                assert len({float(value) for value in values}) == 1
    return found


def bad_part() -> dict[str, str]:
    """What a rank says when another one refuses its part, or fails with it."""
    said = {}

    def accumulate(name: str, parts: Any, model: Any) -> None:
        try:
            make_loss(model).accumulate(parts, process_group=dist.group.WORLD)
        except (SGLangError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    def out_of_memory(*_: Any) -> Any:
        raise RuntimeError("no memory")

    def breaks(parts: Any) -> Any:
        yield next(parts)
        out_of_memory()

    rows = make_rows(8)
    good = lazy_stack(rows).split(4)
    for name in ("forward", "backward"):
        model = make_tiny_model(TOKENIZER, seed=1)
        if RANK == 1 and name == "forward":
            model.register_forward_hook(out_of_memory)
        elif RANK == 1:
            next(model.parameters()).register_hook(out_of_memory)
        accumulate(name, good, model)
    model = make_tiny_model(TOKENIZER, seed=1)
    accumulate("parts", breaks(iter(good)) if RANK == 1 else good, model)
    if RANK == 1:
        rows[0]["advantage"] = torch.full((1, 1), torch.nan)
    accumulate("advantage", lazy_stack(rows).split(4), model)
    return said


def unused_experts() -> dict[str, Any]:
    """Gradients of parameters that the tokens of one rank, or of none, reach."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    ranks = LossRanks(dist.group.WORLD, torch.nn.ParameterList(parameters))
    with own_gradients(parameters, ranks) as gradients:
        reached = parameters[:2] if RANK == 0 else parameters[1:3]
        value = sum(each.sum() for each in reached)
        (value * gradients.weigh(torch.tensor(1))).backward()
    grads = [each.grad for each in parameters]
    return {"grads": [None if each is None else each.tolist() for each in grads]}


def make_collector(engine: Any, **arguments: Any) -> Any:
    settings = {
        "prompts": [{"query": f"question {n}", "answer": str(n)} for n in range(12)],
        "rewards": lambda conversation, task: float(task["answer"]),
        "group_size": 2,
        "groups_per_batch": 4,
        **arguments,
    }
    policy = SGLangWrapper(
        engine, generate_kwargs={"max_new_tokens": 8}, return_generation_info=True
    )
    return AsyncLLMCollector(policy=policy, **settings)


def collect() -> dict[str, Any]:
    """Three batches, an update after each with a sharded model."""
    model = make_tiny_model(TOKENIZER, seed=30)
    fully_shard(model)
    scheme = SGLangWeightSyncScheme(SERVER)
    scheme.create_sender().register_model(model)
    found: dict[str, Any] = {"shares": [], "versions": [], "reports": []}
    collector = SharedCollector(
        None
        if RANK
        else lambda: make_collector(
            AsyncSGLang.connect(SERVER), max_staleness=0, total_groups=12
        ),
        weight_sync_schemes={"policy": scheme},
        prepare=lambda batch: batch.set("mark", torch.ones(len(batch), 1)),
        timeout=120,
    )
    with collector:
        for share in collector:
            found["versions"].append(collector.policy_version)
            assert share["mark"].eq(1).all()
            rows = []
            for row in share:
                assert row["tokens", "full"].tolist() == [
                    *row["tokens", "prompt"].tolist(),
                    *row["tokens", "response"].tolist(),
                ]
                assert row["text"].response
                assert len(row["history"].full) == 2
                rows.append([row["answer"], row["log_probs", "response"].tolist()])
            found["shares"].append(rows)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            found["reports"].append(collector.update_policy_weights_().version)
        found["last"] = collector.policy_version
    try:
        collector.update_policy_weights_()
    except SGLangError as error:
        found["ended"] = str(error)
    scheme.shutdown()
    return found


def failures() -> list[str]:
    """What each rank says when the first one cannot go on."""

    def fails(conversation: Any, task: Any) -> float:
        raise LookupError("no such key")

    def never() -> Any:
        raise LookupError("no collector")

    said = []

    def note(call: Any) -> None:
        try:
            call()
        except SGLangError as error:
            said.append(f"{type(error).__name__}: {error}")
        except LookupError as error:
            said.append(f"LookupError: {error}")

    note(lambda: SharedCollector(never, timeout=60))
    engine = None if RANK else AsyncSGLang.connect(SERVER)
    with SharedCollector(lambda: make_collector(engine, rewards=fails)) as collector:
        note(lambda: next(iter(collector)))
    small = {"group_size": 1, "groups_per_batch": 1}
    with SharedCollector(lambda: make_collector(engine, **small)) as collector:
        note(lambda: next(iter(collector)))
        note(collector.update_policy_weights_)
    return said


class MadeUpCollector:
    """Yields a batch, or fails before."""

    policy_version: Any = 0

    def __init__(self, *batches: Any) -> None:
        self.batches = batches
        self.ended = False

    def __iter__(self) -> Any:
        if not self.batches:
            raise LookupError("no batch")
        return iter(self.batches)

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes any state."""

    def shutdown(self, timeout: Any = None) -> None:
        self.ended = True


def rest() -> list[list[int]]:
    """Sizes of the shares of batches, of which some are too small for the ranks.

    Those of a run, and of one that goes on before its last batch.
    """
    found = []
    for counts, done in ((6, 1, 4, 1), 0), ((1,), 3):
        batches = [lazy_stack(make_rows(count)) for count in counts]
        made = MadeUpCollector(*batches)
        with SharedCollector(lambda made=made: made) as collector:
            collector.load_state_dict({"batches": done})
            found.append([len(share) for share in collector])
    return found


def misfits() -> list[str]:
    """What a rank says of what cannot be told to the others, within seconds."""

    class OwnError(SGLangError):
        """Of a class that cannot be pickled."""

    def never() -> Any:
        raise OwnError("only here")

    rows = [row.set("extra", NonTensorData(lambda: 1)) for row in make_rows(4)]
    no_version = MadeUpCollector()
    no_version.policy_version = None
    said = []
    for make in (
        never,
        lambda: no_version,
        MadeUpCollector,
        lambda: MadeUpCollector(lazy_stack(rows)),
    ):
        try:
            next(iter(SharedCollector(make, timeout=20)))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return [*said, no_version.ended]


def lost() -> str:
    """What a rank says when another one ends before its share."""
    engine = None if RANK else AsyncSGLang.connect(SERVER)
    with SharedCollector(lambda: make_collector(engine), timeout=60) as collector:
        batches = iter(collector)
        next(batches)
        if RANK == 1:
            sys.stdout.write(json.dumps("gone") + "\n")
            sys.stdout.flush()
            import os

            os._exit(1)
        try:
            while True:
                next(batches)
        except SGLangError as error:
            return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{STORE}",
        rank=RANK,
        world_size=SIZE,
        timeout=timedelta(seconds=120),
    )
    found = globals()[TASK]()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    if TASK != "lost":
        dist.barrier()
        dist.destroy_process_group()
