"""safetensors files that are written and read a tensor at a time."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_fast.rollout.engine.weights.tensor_file import (
    infos_of,
    list_tensors,
    num_bytes,
    write_tensors,
)

# An odd number of narrow ones before a wide one: it begins at a multiple of its width.
TENSORS = {
    "narrow": torch.tensor([1, 2, 3], dtype=torch.bfloat16),
    "wide": torch.arange(6.0).view(3, 2),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
    "number": torch.tensor(7),
    "long": torch.arange(4).view(2, 2).t(),
}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        write_tensors(file, infos_of(TENSORS), tensors.items())


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    write(tmp_path / "file", TENSORS)
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value), name
    assert num_bytes(infos_of(TENSORS)) == sum(value.nbytes for value in TENSORS.values())


def test_infos_have_the_dtype_of_the_cast() -> None:
    infos = infos_of({"a": torch.zeros(2, 3), "b": torch.zeros(1, dtype=torch.int64)}, torch.half)
    assert infos == [["a", "float16", [2, 3]], ["b", "int64", [1]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"narrow": torch.zeros(3)}, "expected .'narrow', 'bfloat16', .3.., got .*float32"),
        ({"wide": torch.zeros(2, 3)}, "expected .'wide', 'float32', .3, 2.., got .*2, 3"),
        ({"other": torch.zeros(1)}, "expected one of , got .'other'"),
    ],
)
def test_other_tensors_than_the_header_names_are_refused(
    tmp_path: Path, change: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "file", TENSORS | change)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    some = dict(list(TENSORS.items())[:-1])
    with pytest.raises(ValueError, match="expected long, too"):
        write(tmp_path / "file", some)


def test_rows_are_those_of_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contiguous = {name: value.contiguous() for name, value in TENSORS.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
    stored = list_tensors(path)
    assert stored.keys() == TENSORS.keys()
    for name, value in contiguous.items():
        assert torch.equal(stored[name].read(), value), name
    assert torch.equal(stored["wide"].read(slice(1, 3)), TENSORS["wide"][1:3])
    assert torch.equal(stored["narrow"].read(slice(2, 3)), TENSORS["narrow"][2:3])
    assert stored["wide"].read(slice(3, 3)).shape == (0, 2)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"a": torch.zeros(100)}, path)
    stored = list_tensors(path)["a"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"file: expected \d+ bytes, got \d+"):
        list_tensors(path)
    with pytest.raises(ValueError, match="expected 8 bytes more, got its end"):
        stored.read()
