"""What a server's processes on CPU do first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.forked_starts import trainer_python

from torchrl_sglang.backends.launch.cpu import launch_command

OPERATORS = """
import importlib.util, shutil, sys
from pathlib import Path
import torch

launcher, folder = Path(sys.argv[1]), Path(sys.argv[2])
spec = importlib.util.spec_from_file_location("launch", launcher)
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)

def defined():
    return hasattr(torch.ops.torchvision, "nms")

launch.define_torchvision_operators()
assert not defined(), "there is no torchvision"

def find_torchvision_in(name):
    package = folder / name / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    sys.path.insert(0, str(package.parent))
    importlib.invalidate_caches()
    return package / "_C.so"

library = find_torchvision_in("same build")
shutil.copy(importlib.util.find_spec("_ctypes").origin, library)
launch.define_torchvision_operators()
assert not defined(), "its library loads, and may define them itself"

find_torchvision_in("other build").write_text("built for another torch")
launch.define_torchvision_operators()
assert defined(), "its library does not load"
"""


def test_torchvision_s_operators_are_defined_where_its_library_does_not_load(
    tmp_path: Path,
) -> None:
    launcher = launch_command(python=sys.executable)[1]
    command = [trainer_python(), "-c", OPERATORS, launcher, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
