"""``plan``: computes how a run fits on GPUs, and prints the command to run.

``shapes.py`` reads a model's configuration, ``memory.py`` has the formulas,
``arrange.py`` chooses an arrangement, and ``show.py`` formats it. No weights and no GPU
are needed.

After a change of a formula, run ``docs/source/arrangement_table.py``. Measured peaks
are in ``test/llm/cli/test_plan.py::MEASURED_PASSES``.
"""

from __future__ import annotations

import argparse
from typing import Any

from torchrl_sglang.cli.options import Parser, positive_float, positive_int
from torchrl_sglang.errors import ConfigurationError

DEFAULT_MEMORY = 80.0
"""Default memory of a GPU in GiB, without a GPU here."""

DESCRIPTION = """\
Counts the memory of a GRPO run of MODEL on so many GPUs, trainer and servers, from the
model's configuration alone, and the seconds of a step. It says where each side should
run, and prints the command; or why nothing fits, and remedies.

Bytes are of the tensors that this package, PyTorch and SGLang make, seconds of rates
measured on H100 and H200; the guide "Which arrangement" has formulas and measurements.
The exit status is 1 if nothing fits."""

EPILOG = """\
examples:
  %(prog)s --model Qwen/Qwen2.5-7B-Instruct --gpus 8
  %(prog)s --model ./model --gpus 1 --gpu-memory 24 --lora 16 --sequence 4096
  %(prog)s --model ./config.json --gpus 64 --gpus-per-node 8 --json"""


def add_command(commands: Any) -> Parser:
    """Adds the command to the command line, and returns its parser."""
    parser: Parser = commands.add_parser(
        "plan",
        help="say how a run fits on GPUs, and the command to run",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    text = "folder, config.json or hub name; its weights are not read"
    add("--model", metavar="MODEL", required=True, help=text)
    number: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    add("--gpus", required=True, help="number of GPUs, of all machines", **number)
    text = "GPUs of a machine (default: %(default)s)"
    add("--gpus-per-node", default=8, help=text, **number)
    text = f"of a GPU (default: this machine's, or {DEFAULT_MEMORY:g})"
    add("--gpu-memory", type=positive_float, metavar="GIB", help=text)
    text = "such as H100 or H200 (default: this machine's, or by --gpu-memory)"
    add("--card", type=str.upper, metavar="NAME", help=text)
    text = "tokens of the longest prompt with its response (default: %(default)s)"
    add("--sequence", default=2048, help=text, **number)
    text = "tokens of it that are prompt (default: none), which responses share"
    add("--prompt", help=text, **number)
    text = "tokens of a response in the mean (default: a quarter of the longest)"
    add("--mean-response", help=text, **number)
    text = "responses to a prompt (default: %(default)s)"
    add("--group-size", default=8, help=text, **number)
    text = "prompts of a batch (default: %(default)s)"
    add("--groups-per-batch", default=16, help=text, **number)
    text = "train an adapter of this rank (default: all weights)"
    add("--lora", type=positive_int, metavar="RANK", help=text)
    text = "have a divergence from the model before training"
    add("--reference", action="store_true", help=text)
    text = "keep all activations for the backward pass"
    add("--no-gradient-checkpointing", action="store_true", help=text)
    text = "tokens of a pass (default: the most that fit, up to 16384)"
    add("--max-tokens-per-pass", help=text, **number)
    add("--tp-size", help="GPUs of a server (default: the fewest that fit)", **number)
    text = "the only arrangement to try (default: both, GPUs of their own first)"
    add("--place", choices=("separate", "colocated"), help=text)
    text = "run the code of a checkpoint to read its configuration"
    add("--trust-remote-code", action="store_true", help=text)
    add("--json", action="store_true", help="print one line with a JSON object instead")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prints the arrangement."""
    from torchrl_sglang.cli.plan.arrange import Arrangement, Cluster, arrange
    from torchrl_sglang.cli.plan.memory import GIB, RUNTIME, Workload
    from torchrl_sglang.cli.plan.shapes import read_shape
    from torchrl_sglang.cli.plan.show import nothing_text, to_json, to_text
    from torchrl_sglang.cli.plan.speed import find_card

    shape = read_shape(arguments.model, trust_remote_code=arguments.trust_remote_code)
    if shape.positions and arguments.sequence > shape.positions:
        raise ConfigurationError(
            f"--sequence {arguments.sequence} is more than the {shape.positions} "
            f"tokens that {arguments.model} was made for; give less."
        )
    if arguments.prompt is not None and arguments.prompt >= arguments.sequence:
        raise ConfigurationError(
            f"--prompt {arguments.prompt} leaves no token of --sequence "
            f"{arguments.sequence} for a response; give less, or longer sequences."
        )
    memory, card = _gpu_here()
    if arguments.gpu_memory:
        memory, card = arguments.gpu_memory, find_card(arguments.gpu_memory)
    cluster = Cluster(
        gpus=arguments.gpus,
        per_node=arguments.gpus_per_node,
        memory=memory * GIB,
        card=arguments.card or card,
    )
    if cluster.usable <= 0:
        raise ConfigurationError(
            f"--gpu-memory {memory:g} is less than the {RUNTIME / GIB:g} GiB of a GPU "
            f"that CUDA takes without any tensor; give the memory of a GPU in GiB."
        )
    work = Workload(
        sequence=arguments.sequence,
        prompt=arguments.prompt,
        mean_response=arguments.mean_response,
        group_size=arguments.group_size,
        groups_per_batch=arguments.groups_per_batch,
        lora=arguments.lora,
        reference=arguments.reference,
        checkpointing=not arguments.no_gradient_checkpointing,
    )
    if work.mean > work.longest:
        raise ConfigurationError(
            f"--mean-response {work.mean} is more than the {work.longest} tokens that "
            f"--sequence {work.sequence} has for a response; give less."
        )
    result = arrange(
        shape,
        cluster,
        work,
        tokens=arguments.max_tokens_per_pass,
        tp_size=arguments.tp_size,
        place=arguments.place,
    )
    if arguments.json:
        print(to_json(shape, cluster, work, result))
    elif isinstance(result, Arrangement):
        print(to_text(shape, result))
    else:
        print(nothing_text(shape, cluster, work, result))
    return 0 if isinstance(result, Arrangement) else 1


def _gpu_here() -> tuple[float, str | None]:
    """Returns GiB and name of the smallest GPU, or of the default one."""
    import torch

    from torchrl_sglang.cli.plan.speed import CARDS, find_card

    count = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    if not gpus:
        return DEFAULT_MEMORY, find_card(DEFAULT_MEMORY)
    gpu = min(gpus, key=lambda gpu: gpu.total_memory)
    names = (name for name, card in CARDS.items() if card.device == gpu.name)
    return gpu.total_memory / 2**30, next(names, gpu.name)
