"""pack_steps, and conversion between padded and varlen."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast import Concat, pack_steps, padded_to_varlen, varlen_to_padded
from skyrl_fast.ops.pack.varlen import NATIVE_DTYPES

ONE_ROW = torch.zeros(1, 3)
SIZES = (0, 1, 2, 31, 32, 33, 1000)
INT_DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def flattened(rows: list[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(rows))


def ragged_rows(seed: int = 0, low: int = 0, high: int = 100) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(low, high, size).tolist() for size in SIZES]


# --- cases by hand -------------------------------------------------------------------------------


def test_pack_concatenates_rows(backend: str) -> None:
    packed = pack_steps({"tokens": [[5, 6], [], [7]]}, backend=backend)["tokens"]
    assert packed.values.tolist() == [5, 6, 7]
    assert packed.cu_seqlens.tolist() == [0, 2, 2, 3]
    assert packed.values.dtype == packed.cu_seqlens.dtype == torch.int32


def test_pack_concatenates_parts_row_by_row(backend: str) -> None:
    fields = {"tokens": Concat([[1, 2], [3]], [[4], [5, 6, 7]])}
    packed = pack_steps(fields, backend=backend)["tokens"]
    assert packed.values.tolist() == [1, 2, 4, 3, 5, 6, 7]
    assert packed.cu_seqlens.tolist() == [0, 3, 7]


def test_dtype_follows_the_first_element() -> None:
    packed = pack_steps({"i": [[1]], "f": [[1.0]], "b": [[True]], "u": [np.ones(1, np.uint8)]})
    dtypes = [packed[name].values.dtype for name in "ifbu"]
    assert dtypes == [torch.int32, torch.float32, torch.uint8, torch.uint8]


@pytest.mark.spec("batch.cu-seqlens")
def test_varlen_table(backend: str) -> None:
    padded = torch.tensor([[0, 5], [6, 7]])
    varlen = padded_to_varlen(padded, torch.tensor([[0, 1], [1, 1]]), backend=backend)
    assert varlen.values.tolist() == [5, 6, 7]
    assert varlen.cu_seqlens.tolist() == [0, 1, 3]
    assert varlen.position_ids.tolist() == [0, 0, 1]
    assert torch.equal(varlen_to_padded(varlen.values, varlen.cu_seqlens, backend=backend), padded)


@pytest.mark.spec("batch.both-sides")
def test_padding_on_both_sides_table(backend: str) -> None:
    # A prompt padded on the left before a response padded on the right; the second row is empty.
    padded = torch.tensor([[0, 5, 6, 0], [0, 0, 0, 0], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    varlen = padded_to_varlen(padded, mask, side="both", backend=backend)
    assert varlen.values.tolist() == [5, 6, 1, 2, 3, 4]
    assert varlen.cu_seqlens.tolist() == [0, 2, 2, 6]
    assert varlen.position_ids.tolist() == [0, 1, 0, 1, 2, 3]
    assert varlen.starts.tolist() == [1, 0, 0]
    options = {"width": 4, "starts": varlen.starts, "side": "both", "backend": backend}
    back = varlen_to_padded(varlen.values, varlen.cu_seqlens, pad_value=9, **options)
    assert back.tolist() == [[9, 5, 6, 9], [9, 9, 9, 9], [1, 2, 3, 4]]
    again = padded_to_varlen(
        back, lengths=[2, 0, 4], starts=[1, 0, 0], side="both", backend=backend
    )
    assert all(torch.equal(a, b) for a, b in zip(varlen, again, strict=True))


# --- every input type, dtype and backend ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(
    "source", ["list", "tuple", "numpy", "torch", "flat", "strided", "scalars"]
)
def test_integers_from_any_input_type(dtype: torch.dtype, source: str) -> None:
    rows = ragged_rows()
    wide = np.concatenate([np.repeat(row, 2).astype(np.int64) for row in rows])
    cu = np.cumsum([0, *SIZES])
    sources = {
        "list": rows,
        "tuple": tuple(map(tuple, rows)),
        "numpy": [np.array(row, dtype=np.int64) for row in rows],
        "torch": [torch.tensor(row, dtype=torch.int32) for row in rows],
        "flat": (torch.tensor(flattened(rows)), torch.tensor(cu)),
        "strided": (wide[::2], cu.astype(np.int32)),
        "scalars": [[np.int16(value) for value in row] for row in rows],
    }
    fields = {"x": sources[source]}
    packed = pack_steps(fields, dtypes={"x": dtype})["x"]
    assert packed.values.dtype == dtype
    assert packed.values.tolist() == flattened(rows)


@pytest.mark.parametrize("dtype", INT_DTYPES)
def test_numpy_integers_of_any_width(dtype: str) -> None:
    rows = [np.arange(size % 100, dtype=dtype) for size in SIZES]
    assert pack_steps({"x": rows})["x"].values.tolist() == np.concatenate(rows).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_of_any_width(dtype: torch.dtype) -> None:
    values = [0.0, -0.0, 1.5, -2.25, 6e-8, 65504.0, float("inf"), float("-inf"), float("nan")]
    row = torch.tensor(values, dtype=dtype)
    packed = pack_steps({"x": [row, row[::2]]})["x"].values
    assert torch.equal(packed, torch.cat([row, row[::2]]).float().nan_to_num(nan=7)) or torch.equal(
        packed.nan_to_num(nan=7), torch.cat([row, row[::2]]).float().nan_to_num(nan=7)
    )


def test_two_dimensional_arrays_are_rows() -> None:
    assert pack_steps({"x": np.arange(6).reshape(2, 3)})["x"].cu_seqlens.tolist() == [0, 3, 6]


def test_mixed_lists_and_arrays() -> None:
    assert pack_steps({"x": [[1], np.array([2]), torch.tensor([3])]})["x"].values.tolist() == [
        1,
        2,
        3,
    ]


def test_bools_are_accepted_as_masks_only() -> None:
    rows = [[True, False], [np.bool_(True)], np.array([False])]
    assert pack_steps({"m": rows})["m"].values.tolist() == [1, 0, 1, 0]
    assert pack_steps({"m": rows}, dtypes={"m": torch.bool})["m"].values.dtype == torch.bool
    assert pack_steps({"m": rows}, dtypes={"m": torch.float32})["m"].values.tolist() == [1, 0, 1, 0]
    for bad in ([[5, True]], [[5, np.bool_(True)]], [[5], np.array([True])]):
        with pytest.raises(TypeError, match="integer"):
            pack_steps({"ids": bad})


@pytest.mark.parametrize("size", [7, 8, 9, 16, 33, 200])
@pytest.mark.parametrize("last", [3, 70_000, 2**40])
def test_runs_of_one_object(size: int, last: int) -> None:
    one, half = 70_000, 0.5
    rows = [[one] * size, [one] * size + [last], [last] + [one] * size, [one, last] * size]
    ids = pack_steps({"ids": rows}, dtypes={"ids": torch.int64})["ids"].values
    assert ids.tolist() == flattened(rows)
    mixed = [[half] * size + [last], [True] * size + [half], [one] * size + [half, False]]
    numbers = pack_steps({"x": mixed}, dtypes={"x": torch.float32})["x"].values
    assert torch.equal(numbers, torch.tensor(flattened(mixed), dtype=torch.float32))


@pytest.mark.parametrize("odd", [-1, 256, 2**70])
def test_run_of_numbers_out_of_range_is_refused(odd: int) -> None:
    with pytest.raises(ValueError, match=r"row 0, position 1\b"):
        pack_steps({"x": [[1] + [odd] * 40]}, dtypes={"x": torch.uint8})


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60), max_size=12))
def test_integers_round_trip(rows: list[list[int]]) -> None:
    packed = pack_steps({"x": rows}, dtypes={"x": torch.int64})["x"]
    assert packed.values.tolist() == flattened(rows)
    assert packed.cu_seqlens.diff().tolist() == [len(row) for row in rows]


@given(
    st.lists(st.lists(st.floats(width=32) | st.integers(-(2**60), 2**60), max_size=60), max_size=9)
)
def test_floats_round_trip(rows: list[list[float]]) -> None:
    packed = pack_steps({"x": rows}, dtypes={"x": torch.float32})["x"].values
    wanted = torch.tensor(flattened(rows), dtype=torch.float32)
    assert torch.equal(packed.nan_to_num(nan=0.5), wanted.nan_to_num(nan=0.5))


@pytest.mark.spec("batch.flat-round-trip")
@given(
    st.integers(1, 40),
    st.integers(0, 9),
    st.sampled_from(["left", "right", "both"]),
    st.sampled_from([(), (3,), (2, 2)]),
    st.sampled_from(NATIVE_DTYPES),
)
def test_varlen_equals_the_reference(
    width: int, num_rows: int, side: str, cell: tuple[int, ...], dtype: torch.dtype
) -> None:
    padded = (torch.randn(num_rows, width, *cell) * 3).to(dtype)
    lengths = torch.randint(0, width + 1, (num_rows,))
    rows: dict[str, Any] = {"side": side}
    if side == "both":
        rows["starts"] = (torch.rand(num_rows) * (width - lengths + 1)).long()
    native = padded_to_varlen(padded, lengths=lengths, **rows)
    wanted = padded_to_varlen(padded, lengths=lengths, **rows, backend="torch")
    assert all(torch.equal(a, b) for a, b in zip(native, wanted, strict=True))
    columns, starts = torch.arange(width), native.starts[:, None]
    mask = (columns >= starts) & (columns < starts + lengths[:, None])
    assert torch.equal(padded_to_varlen(padded, mask, side=side).values, padded[mask])
    for backend in ("native", "torch"):
        back = varlen_to_padded(*native[:2], width=width, **rows, pad_value=7, backend=backend)
        again = padded_to_varlen(back, lengths=lengths, **rows)
        if dtype == torch.bool:
            continue
        assert torch.equal(again.values, native.values)
        assert float((back == 7).sum()) >= float((width - lengths).sum())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32]
)
def test_masks_of_any_dtype(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1]]).to(dtype)
    varlen = padded_to_varlen(torch.arange(9).reshape(3, 3), mask)
    assert varlen.values.tolist() == [1, 2, 6, 7, 8]


@pytest.mark.spec("batch.both-sides")
def test_gradients_of_padding_on_both_sides(backend: str) -> None:
    starts, lengths = torch.tensor([1, 0, 0]), torch.tensor([2, 0, 4])

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        options = {"starts": starts, "side": "both", "backend": backend}
        varlen = padded_to_varlen(x, lengths=lengths, **options)
        return varlen_to_padded(varlen.values * 2, varlen.cu_seqlens, width=4, **options)

    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(there_and_back, (x,))
    assert torch.autograd.gradgradcheck(there_and_back, (x,))


def test_varlen_gradients(backend: str) -> None:
    lengths = torch.tensor([2, 0, 3])

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        varlen = padded_to_varlen(x, lengths=lengths, backend=backend)
        return varlen_to_padded(varlen.values * 2, varlen.cu_seqlens, width=4, backend=backend)

    x = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(there_and_back, (x,))


def test_varlen_of_cells_without_elements(backend: str) -> None:
    x = torch.zeros(2, 5, 0, requires_grad=True)
    varlen = padded_to_varlen(x, lengths=torch.tensor([1, 2]), backend=backend)
    assert varlen.values.shape == (3, 0)
    assert varlen_to_padded(*varlen[:2], width=7, backend=backend).shape == (2, 7, 0)
    varlen.values.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


# --- hostile input ---------------------------------------------------------------------------


def test_no_rows_give_empty_tensors(backend: str) -> None:
    packed = pack_steps({"x": []}, backend=backend)["x"]
    assert (packed.values.numel(), packed.cu_seqlens.tolist()) == (0, [0])
    assert padded_to_varlen(
        torch.zeros(0, 4), lengths=torch.zeros(0, dtype=torch.int64)
    ).values.shape == (0,)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([[1], [2, "three"]], TypeError, "pack_steps: ids, row 1, position 1: .* got str 'three'"),
        ([[1], [None]], TypeError, "ids, row 1, position 0: .* got NoneType"),
        ([[1, 2.5]], TypeError, "ids, row 0, position 1: .* got float 2.5"),
        ([[1, [2]]], TypeError, "ids, row 0, position 1: .* got list"),
        ([[1, 2**31]], ValueError, "ids, row 0, position 1: .* got int 2147483648"),
        ([[1, 2**64]], ValueError, "ids, row 0, position 1: .* got int 18446744073709551616"),
        ([[1, -(2**64)]], ValueError, "ids, row 0, position 1"),
        ([[0] * 50 + [2**31] + [0] * 50], ValueError, "position 50"),
        ([[1], 5], TypeError, "ids, row 1: expected a list of numbers or a 1-D array, got int"),
        ([[1], "ab"], TypeError, "ids, row 1: .* got str"),
        ([[1], {2: 3}], TypeError, "ids, row 1: .* got dict"),
        ("abc", TypeError, "ids: expected a list of rows, got str"),
        ([np.zeros((2, 2), np.int64)], ValueError, "ids, row 0: expected a 1-D array"),
        ([[1], np.array([1.5])], TypeError, "ids, row 1: expected integers, got float64"),
        (
            [[1], np.array([1, 2**40])],
            ValueError,
            "ids, row 1, position 1: expected an integer from",
        ),
        ([[1], np.array([2**63], np.uint64)], ValueError, "ids, row 1, position 0"),
        ([[1], np.array(["a"])], TypeError, "ids, row 1"),
        ([[1], np.array([1j])], TypeError, "ids, row 1"),
        (
            (torch.arange(3), torch.tensor([0, 2])),
            ValueError,
            "cu_seqlens: expected offsets from 0 to",
        ),
        (
            (torch.arange(3), torch.tensor([0, 3, 2, 3])),
            ValueError,
            "cu_seqlens: expected non-decr",
        ),
        ((torch.arange(3), torch.tensor([0, -5, 3])), ValueError, "cu_seqlens: expected non-decr"),
        (
            (torch.arange(3), torch.tensor([0.0, 3.0])),
            ValueError,
            "cu_seqlens: expected int32 or int64",
        ),
    ],
)
def test_invalid_rows_error_names_the_row(
    rows: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pack_steps({"ids": rows}, dtypes={"ids": torch.int32})


def test_invalid_options_error_names_the_option() -> None:
    rows = {"a": [[1, 2]], "b": [[1]]}
    cases = [
        (lambda: pack_steps({}), TypeError, "non-empty mapping .*, got an empty one"),
        (lambda: pack_steps([[1, 2]]), TypeError, "non-empty mapping .*, got list$"),
        (
            lambda: pack_steps({"a": [[1]], "b": []}),
            ValueError,
            "equally many rows in all, got 1 in a and 0",
        ),
        (
            lambda: pack_steps(rows, aligned=[("a", "b")]),
            ValueError,
            "b: expected as many entries as a .* row 0",
        ),
        (lambda: pack_steps(rows, aligned=[("a", "c")]), ValueError, "'c'"),
        (
            lambda: pack_steps(rows, dtypes={"c": torch.int32}),
            ValueError,
            "dtypes must name fields",
        ),
        (lambda: pack_steps(rows, dtypes={"a": torch.float64}), ValueError, "float64"),
        (lambda: pack_steps(rows, backend="triton"), ValueError, "triton"),
        (lambda: padded_to_varlen(torch.zeros(2, 3)), ValueError, "either attention_mask"),
        (
            lambda: padded_to_varlen(torch.zeros(1, 3), torch.tensor([[1, 0, 1]])),
            ValueError,
            "row 0",
        ),
        (
            lambda: padded_to_varlen(torch.zeros(1, 3), torch.tensor([[0, 2, 1]])),
            ValueError,
            "row 0",
        ),
        (
            lambda: padded_to_varlen(torch.zeros(1, 3), lengths=torch.tensor([4])),
            ValueError,
            "0 to 3",
        ),
        *(
            (lambda row=row: padded_to_varlen(ONE_ROW, row, side="both"), ValueError, "row 0")
            for row in torch.tensor([[1, 0, 1], [1, 2, 0], [0, -1, 0], [2, 2, 2]])[:, None]
        ),
        (
            lambda: padded_to_varlen(ONE_ROW, torch.tensor([[0, float("nan"), 1]]), side="both"),
            ValueError,
            "row 0",
        ),
        (
            lambda: padded_to_varlen(ONE_ROW, torch.tensor([[0, 1, 0]])),
            ValueError,
            "row 0; for padding on both sides: side='both'",
        ),
        (lambda: padded_to_varlen(ONE_ROW, ONE_ROW, starts=[0]), ValueError, "with lengths only"),
        (lambda: padded_to_varlen(ONE_ROW, lengths=[1], side="both"), ValueError, "wants starts"),
        (lambda: padded_to_varlen(ONE_ROW, lengths=[1], starts=[0]), ValueError, "no starts"),
        (lambda: padded_to_varlen(ONE_ROW, lengths=[1], side="up"), ValueError, "'up'"),
        *(
            (
                lambda start=start: padded_to_varlen(
                    ONE_ROW, lengths=[1], starts=[start], side="both"
                ),
                ValueError,
                f"starts: expected 0 to 3 minus .*, got {start} in row 0",
            )
            for start in (-1, 3, 2**40, -(2**63))
        ),
        (
            lambda: varlen_to_padded(torch.ones(2), [0, 2], width=3, starts=[2], side="both"),
            ValueError,
            "got 2 in row 0",
        ),
        (
            lambda: padded_to_varlen(ONE_ROW, lengths=[1], starts=[0, 0], side="both"),
            ValueError,
            "starts: expected .1,. integers",
        ),
        (lambda: varlen_to_padded(torch.zeros(3), torch.tensor([0, 2])), ValueError, "from 0 to 3"),
        (
            lambda: varlen_to_padded(torch.zeros(3), torch.tensor([0, 3]), width=2),
            ValueError,
            "(3), got 2",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message.replace("(3)", r"\(3\)")):
            call()


def test_more_elements_than_int32_offsets_is_refused() -> None:
    huge = np.broadcast_to(np.uint8(1), (2**31 - 1,))  # uses no memory
    with pytest.raises(ValueError, match=r"at most 2147483647 elements .* got 2147483648; split"):
        pack_steps({"x": [huge, [1]]}, dtypes={"x": torch.uint8})
    wide = torch.zeros(1, 1).expand(2, 2**30 + 1)
    with pytest.raises(ValueError, match="at most 2147483647 elements"):
        padded_to_varlen(wide, lengths=torch.tensor([2**30 + 1, 2**30]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_keyboard_interrupt_in_an_element_is_propagated(dtype: torch.dtype) -> None:
    class Interrupted:
        def __index__(self) -> int:
            raise KeyboardInterrupt

        __float__ = __index__

    with pytest.raises(KeyboardInterrupt):
        pack_steps({"x": [[1, Interrupted()]]}, dtypes={"x": dtype})


def test_list_changed_by_its_own_elements() -> None:
    class Shrinking:
        def __index__(self) -> int:
            row.clear()
            return 1

    row: list[object] = [1, 2, Shrinking(), 3]
    with pytest.raises(ValueError, match=r"row 0, position 3: the list was 4 long .* and is now 0"):
        pack_steps({"x": [row]})


@pytest.mark.timeout(60)
def test_lists_mutated_by_another_thread() -> None:
    rows = [list(range(300, 1300)) for _ in range(50)]
    stop = threading.Event()

    def mutate() -> None:
        while not stop.is_set():
            for row in rows:
                del row[500:]
                row.extend(range(10**6, 10**6 + 500))

    thread = threading.Thread(target=mutate)
    thread.start()
    try:
        for _ in range(300):
            try:
                packed = pack_steps({"x": rows})["x"]
                assert packed.values.min() >= 300
            except ValueError as error:
                assert "another thread must not change it" in str(error)
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_large_lists_are_read_by_several_threads(two_threads: None) -> None:
    rows: list[Any] = [list(range(i, i + 3000)) for i in range(150)]  # 18 MB of ints
    odd = {3: [np.int64(7)] * 3000, 77: np.arange(3000), 140: tuple(range(3000))}
    for row, values in odd.items():
        rows[row] = values
    got = pack_steps({"tokens": rows})["tokens"].values
    assert torch.equal(got, torch.tensor(np.concatenate([np.asarray(r) for r in rows])).int())


def test_first_error_in_large_lists_is_reported(two_threads: None) -> None:
    rows: list[Any] = [[1] * 3000 for _ in range(150)]
    rows[149][5] = "x"
    rows[60][2999] = 2**31
    with pytest.raises(ValueError, match=r"row 60, position 2999: expected an integer from"):
        pack_steps({"tokens": rows})
    rows[60][2999] = 1
    with pytest.raises(TypeError, match=r"row 149, position 5: expected an integer, got str 'x'"):
        pack_steps({"tokens": rows})


def test_a_row_that_changes_an_earlier_one_is_an_error() -> None:
    """An array's memory is read after the Python code of later rows has run."""
    earlier = torch.arange(200_000)

    class Row:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            earlier.resize_(0)
            if index >= 2:
                raise IndexError
            return 1

    with pytest.raises(ValueError, match="row 0 must not change while the rows are read"):
        pack_steps({"a": [earlier, Row()]})
