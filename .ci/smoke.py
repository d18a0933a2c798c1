"""Uses an installed torchrl_sglang: each module, and a real server."""

import importlib
import pkgutil
import sys
from pathlib import Path

import torchrl_sglang
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.testing.tiny_model import save_tiny_model

RUN_BY_OTHERS = {
    "torchrl_sglang.backends.launch.cpu.launch",
    "torchrl_sglang.backends.launch.loaders.torchrl_sglang_vllm",
    "torchrl_sglang.gateway.adapters.verifiers_program",
}
"""Programs of other Pythons, SGLang's and verifiers', with other packages."""


def main() -> None:
    """Import everything, and generate a few tokens."""
    assert Path(torchrl_sglang.__file__).is_relative_to(sys.prefix)
    for name in torchrl_sglang.__all__:
        getattr(torchrl_sglang, name)
    for module in pkgutil.walk_packages(torchrl_sglang.__path__, "torchrl_sglang."):
        if module.name not in {*RUN_BY_OTHERS, "torchrl_sglang.__main__"}:
            importlib.import_module(module.name)
    with AsyncSGLang.from_pretrained(save_tiny_model("model"), device="cpu") as engine:
        options = {"max_new_tokens": 8, "ignore_eos": True}
        (completion,) = engine.generate(["Hello"], sampling_params=options)
    assert len(completion.token_ids) == 8
    print(f"torchrl_sglang {torchrl_sglang.__version__} is installed and generates.")


if __name__ == "__main__":
    main()
