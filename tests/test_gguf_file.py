"""GGUF files: every type of the package, parts, and files that lie."""

import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from models.gguf_files import write_gguf, write_tensors
from refusals import refused

from kvsift.checkpoint import fingerprint, tokenizer_fingerprint
from kvsift.gguf_file import GgufFile, is_gguf


def _can_be_expanded(kind: Kind) -> bool:
    try:
        gguf.dequantize(_packed(kind, 1), kind)
    except NotImplementedError:
        return False
    return True


def _packed(kind: Kind, num_rows: int) -> np.ndarray:
    """Two random blocks a row."""
    if kind in (Kind.F32, Kind.F16):
        return (
            np.random.default_rng(0).normal(size=(num_rows, 64)).astype(np.float32 if kind == Kind.F32 else np.float16)
        )
    num_bytes = 2 * gguf.GGML_QUANT_SIZES[kind][1]
    return np.random.default_rng(0).integers(0, 256, (num_rows, num_bytes), np.uint8)


EXPANDED = [kind for kind in Kind if _can_be_expanded(kind)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(model, tmp_path))


def test_every_type_is_expanded_as_the_package_does(tmp_path: Path) -> None:
    assert {Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q8_0, Kind.Q2_K, Kind.Q6_K, Kind.IQ4_XS, Kind.MXFP4} <= {*EXPANDED}
    packed = {kind.name: (_packed(kind, 5), kind) for kind in EXPANDED}
    file = GgufFile.open(write_tensors(tmp_path / "types.gguf", packed))
    for name, (values, kind) in packed.items():
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(values, kind)
        tensor = file.tensors[name]
        assert (tensor.type, tensor.shape) == (kind, expected.shape)
        rows = [tensor.expand(start, start + 2) for start in (0, 2, 4)]
        np.testing.assert_array_equal(np.concatenate(rows), expected, name)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in EXPANDED])
def test_a_type_that_cannot_be_expanded_is_named(copy: Path, kind: Kind) -> None:
    _change_type(copy, kind.value)
    with refused(f"wrong_file: {kind.name}"):
        GgufFile.open(copy)


def test_a_type_that_does_not_exist_is_named(copy: Path) -> None:
    _change_type(copy, 999)
    with refused("wrong_file: 999"):
        GgufFile.open(copy)


def _change_type(path: Path, kind: int) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8  # dimensions: their number, the one
    content[at : at + 4] = kind.to_bytes(4, "little")
    path.write_bytes(content)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "tiny.gguf", split=8)
    return sorted(tmp_path.iterdir())


def test_a_split_model_is_that_of_one_file(model: Path, parts: list[Path]) -> None:
    assert parts[0].name == f"tiny-00001-of-{len(parts):05}.gguf"
    assert fingerprint(parts[0]) == fingerprint(model)
    assert tokenizer_fingerprint(parts[0]) == tokenizer_fingerprint(model)
    assert GgufFile.open(parts[0]).tensors.keys() == GgufFile.open(model).tensors.keys()


def test_another_part_than_the_first_is_refused(parts: list[Path]) -> None:
    with refused(f"wrong_file: {len(parts):05}"):
        GgufFile.open(parts[1])


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[-1].unlink()
    with refused(f"missing_file: {len(parts)}"):
        GgufFile.open(parts[0])


def test_a_part_in_the_place_of_another_is_refused(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    with refused(f"wrong_file: {parts[2].name}"):
        GgufFile.open(parts[0])


def test_a_copy_has_the_fingerprint_of_the_file_and_other_weights_do_not(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(model, tmp_path / "renamed"))  # without a suffix, as some programs store them
    assert is_gguf(copy)
    assert fingerprint(copy) == fingerprint(model)
    write_gguf(tmp_path / "other.gguf", seed=2)
    assert fingerprint(tmp_path / "other.gguf") != fingerprint(model)
    assert tokenizer_fingerprint(tmp_path / "other.gguf") == tokenizer_fingerprint(model)
    write_gguf(tmp_path / "longer.gguf", max_position_embeddings=2048)
    assert fingerprint(tmp_path / "longer.gguf") != fingerprint(model)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "unreadable_file"),
        (b"PK\3\4" + bytes(60), "wrong_file: it does not begin with the letters GGUF"),
        (b"GGUF" + bytes(60), "wrong_file: its version is 0, and those that can be read are 2 and 3"),
        (b"GGUF\3\0\0\0", "damaged_file"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with refused(says):
        GgufFile.open(tmp_path / "model.gguf")


def test_a_download_that_was_cut_off_is_refused(copy: Path) -> None:
    content = copy.read_bytes()
    copy.write_bytes(content[:-1000])
    with refused("wrong_file: 385,984"):
        GgufFile.open(copy)


def test_the_missing_package_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsift import gguf_file

    gguf_file._block.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refused("missing_package"):
        GgufFile.open(model)
