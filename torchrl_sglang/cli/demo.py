"""``demo``: trains a tiny model against a real server, as an end-to-end test.

:func:`train` is the whole program: copy it, and insert your model and reward.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchrl_sglang.cli.options import Parser, engine_arguments, positive_int

DESCRIPTION = """\
Trains a tiny model of random weights with GRPO to write letters in ascending order,
against a server of SGLang that it starts: no download of a model, and no GPU needed.
Its reward rises from 0.4 to 0.8 in 30 steps, a minute or two on two cores.

Without a GPU, SGLang runs in an environment of its own, which --install makes (up to 3
GB to download, with gcc and make)."""

EPILOG = """\
examples:
  %(prog)s --install
  %(prog)s --steps 5 --output runs/short
  %(prog)s --mem-fraction-static 0.5     # an option of the server"""


def add_command(commands: Any) -> Parser:
    """Adds the command to the command line, and returns its parser."""
    parser: Parser = commands.add_parser(
        "demo",
        help="train a tiny model against a real server",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    text = "folder for the model and the records (default: %(default)s)"
    add("--output", type=Path, default=Path("runs/demo"), metavar="DIR", help=text)
    text = "batches to train on (default: %(default)s)"
    add("--steps", type=positive_int, default=30, metavar="N", help=text)
    text = "of the weights and the samples (default: %(default)s)"
    add("--seed", type=int, default=0, metavar="N", help=text)
    text = "where the server runs (default: a GPU if there is one)"
    add("--device", choices=("cpu", "cuda"), help=text)
    text = "make SGLang's environment for CPU first, if it is not there"
    add("--install", action="store_true", help=text)
    parser.set_defaults(run=run, takes_engine_options=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Trains, and prints the path of the program."""
    if arguments.install:
        from torchrl_sglang.cli.cpu import install

        if status := install.main([]):
            return status
    engine = engine_arguments(arguments.engine_words, arguments.own_options)
    if arguments.device is not None:
        engine["device"] = arguments.device
    output = arguments.output.expanduser()
    train(output, arguments.steps, arguments.seed, engine)
    print(f"The program, to copy and change: {__file__}")
    return 0


def ascending(conversation: Any, task: Any) -> float:
    """Rewards the share of neighbouring characters in ascending order."""
    text: str = conversation.response
    return sum(a < b for a, b in pairwise(text)) / max(len(text) - 1, 15)


def train(output: Path, steps: int, seed: int, engine: dict[str, Any]) -> Path:
    """Returns the folder of the trained model."""
    from torchrl_sglang import GRPO
    from torchrl_sglang.testing.tiny_model import save_tiny_model

    prompts = [{"query": f"Say {number}."} for number in range(100)]
    return GRPO(
        save_tiny_model(output / "initial_model", seed=seed),  # or a name from the hub
        prompts=prompts[:80],
        rewards=ascending,
        eval_prompts=prompts[80:],
        eval_every=5,
        generate_kwargs={"max_new_tokens": 16},
        engine=engine,
        steps=steps,
        lr=3e-3,
        seed=seed,
        output=output,
    ).train()
