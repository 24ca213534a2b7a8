"""What an installed package brings along, and what it must not."""

import contextlib
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest

import kvsift
from kvsift import native

ROOT = Path(__file__).parent.parent


def has_nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(has_nvidia_gpu(), reason="CUDA packages belong on a machine with an NVIDIA GPU")
def test_no_cuda_package_is_installed_without_a_gpu():
    cuda = {dist.name for dist in distributions() if dist.name and dist.name.lower().startswith("nvidia-")}
    assert not cuda


def built_wheel(tmp_path: Path, **settings: str) -> list[str]:
    """Names of the files in the wheel of this checkout."""
    from scikit_build_core.build import build_wheel

    with contextlib.chdir(ROOT):
        wheel = build_wheel(str(tmp_path), {"build-dir": str(tmp_path / "build"), **settings})
    return zipfile.ZipFile(tmp_path / wheel).namelist()


def test_the_wheel_carries_the_embedded_model_and_its_types(tmp_path):
    names = built_wheel(tmp_path, **{"wheel.cmake": "false"})
    data = "texts/facts.toml", "texts/words.toml"
    for name in ("embedded/weights.npz", "embedded/tokenizer.json", "embedded/README.md", "py.typed", *data):
        assert f"kvsift/{name}" in names
    assert {"kvsift/kernels/sift/common.cu", "kvsift/kernels/streamed_rows.cu"} <= set(names)
    page = {f"kvsift/server/page/{path.name}" for path in (ROOT / "src/kvsift/server/page").iterdir()}
    assert {name for name in names if name.startswith("kvsift/server/page/")} == page
    assert not [name for name in names if name.startswith(("tests/", "lab/", "kvsift_lab/", "results/", "csrc/"))]
    assert not [name for name in names if name.endswith(".so")]  # that of the checkout is for its own Python


def test_both_wheels_work_in_a_clean_environment(tmp_path):
    """Only what they depend on comes from outside."""
    from hatchling.build import build_wheel as build_lab

    built_wheel(tmp_path, **{"wheel.cmake": "false"})
    with contextlib.chdir(ROOT / "lab"):
        build_lab(str(tmp_path))
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", *map(str, tmp_path.glob("*.whl")))
    for module in ("kvsift", "kvsift_lab"):
        assert run(python, "-c", f"import {module}; print({module}.__file__)").startswith(packages)
    command = tmp_path / "env" / "bin" / "kvsift"
    assert run(command, "--version").strip() == f"kvsift {kvsift.__version__}"
    assert f"kvsift-lab {kvsift.__version__}" in " ".join(run(python, "-m", "pip", "list").split())
    assert "sketch:" in run(command, "methods", "sketch")
    assert "decode" in run(command, "bench", "--help")


def run(*command):
    return subprocess.run([*map(str, command)], cwd="/", capture_output=True, text=True, check=True).stdout


def test_without_a_compiler_the_wheel_lacks_only_the_core(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler-here"))
    names = built_wheel(tmp_path)
    assert "kvsift/native/loader.py" in names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.skipif(not native.available(), reason=native.why_missing())
def test_the_compiled_core_is_small():
    assert Path(native.core.__file__).stat().st_size < 2_300_000


def test_runtime_dependencies_are_few():
    runtime = [need for need in requires("kvsift") or [] if "extra ==" not in need]
    assert len(runtime) <= 6


def test_the_tracked_tree_stays_small():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout:
        pytest.skip("this is no git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0")[:-1]]
    size = sum(path.stat().st_size for path in paths if path.is_file())
    assert size <= 36_000_000, f"{size / 1e6:.1f} MB are tracked: a copy of the tree hardly fits where it has to travel"
