"""What an installed package brings along, and what it must not."""

import shutil
import subprocess
import zipfile
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def has_nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(has_nvidia_gpu(), reason="CUDA packages belong on a machine with an NVIDIA GPU")
def test_no_cuda_package_is_installed_without_a_gpu():
    cuda = {dist.name for dist in distributions() if dist.name and dist.name.lower().startswith("nvidia-")}
    assert not cuda


def test_the_wheel_carries_the_embedded_model_and_its_types(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("embedded/model.safetensors", "embedded/tokenizer.json", "embedded/README.md", "py.typed"):
        assert f"kvsift/{name}" in names
    assert not [name for name in names if name.startswith(("tests/", "recipes/", "results/"))]


def test_runtime_dependencies_are_few():
    runtime = [need for need in requires("kvsift") or [] if "extra ==" not in need]
    assert len(runtime) <= 6
