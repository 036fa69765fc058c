"""The count of a kernel's instructions for each element, on a small listing and on real objects."""

import pytest

from scripts import cuda_check, sass

pytestmark = pytest.mark.spec("gpu.instructions")

# As `cuobjdump -sass` prints it: a prologue, a loop of two guarded loads with a rare branch and a
# call, the end, and the called function.
LISTING = """
		Function : _Zloop
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00 */
        /*0010*/               @P0 EXIT ;                                 /* 0x00 */
        /*0020*/                   LDG.E.EF.128 R4, desc[UR4][R2.64] ;    /* 0x00 */
        /*0030*/               @P1 BRA 0x50 ;                             /* 0x00 */
        /*0040*/                   LDG.E.EF.128 R8, desc[UR4][R2.64+0x10] ;  /* 0x00 */
        /*0050*/                   MUFU.EX2 R4, R4 ;                      /* 0x00 */
        /*0060*/                   MUFU.EX2 R5, R5 ;                      /* 0x00 */
        /*0070*/              @!P2 BRA P3, 0xa0 ;                         /* 0x00 */
        /*0080*/                   FADD R6, R6, R4 ;                      /* 0x00 */
        /*0090*/                   CALL.REL.NOINC 0x110 ;                 /* 0x00 */
        /*00a0*/                   BRA.DIV UR4, 0xf0 ;                    /* 0x00 */
        /*00b0*/               @P4 BRA 0x20 ;                             /* 0x00 */
        /*00c0*/                   STG.E.U16 desc[UR4][R2.64], R6 ;       /* 0x00 */
        /*00d0*/                   STG.E.128 desc[UR4][R2.64], R4 ;       /* 0x00 */
        /*00e0*/                   EXIT ;                                 /* 0x00 */
        /*00f0*/                   WARPSYNC.COLLECTIVE R1, 0x100 ;        /* 0x00 */
        /*0100*/                   BRA 0xb0 ;                             /* 0x00 */
        /*0110*/                   FMUL R4, R4, R4 ;                      /* 0x00 */
        /*0120*/               @P5 BRA 0x140 ;                            /* 0x00 */
        /*0130*/                   FMUL R4, R4, R4 ;                      /* 0x00 */
        /*0140*/                   RET.REL.NODEC R2 0x0 ;                 /* 0x00 */
		Function : _Ztable
        /*0000*/                   BRX R2 -0x10 ;                         /* 0x00 */
        /*0010*/                   MUFU.EX2 R4, R4 ;                      /* 0x00 */
        /*0020*/                   BRA 0x50 ;                             /* 0x00 */
        /*0030*/                   FADD R4, R4, R4 ;                      /* 0x00 */
        /*0040*/                   MUFU.EX2 R4, R4 ;                      /* 0x00 */
        /*0050*/                   EXIT ;                                 /* 0x00 */
"""


def test_one_pass_of_a_loop_is_counted_with_its_rare_branch_apart() -> None:
    code = sass.functions(LISTING)["_Zloop"]
    counted = sass.count(code, sass.Work(in_loop=True, per_load=1))
    # 0x20 to 0xb0: without FADD, CALL and the function's 3 to 4, or with them
    assert (counted.shortest, counted.longest) == (8, 14)
    assert (counted.elements, counted.loads, counted.stores) == (2, 2, 0)
    assert counted.per_element == (4.0, 7.0)
    assert counted.outside == 5


def test_complete_kernel_is_counted_with_each_loop_once() -> None:
    code = sass.functions(LISTING)["_Zloop"]
    counted = sass.count(code, sass.Work(in_loop=False, per_load=1))
    assert (counted.shortest, counted.longest, counted.stores) == (13, 19, 1)


def test_jumps_through_a_table_reach_the_blocks_behind_them() -> None:
    code = sass.functions(LISTING)["_Ztable"]
    counted = sass.count(code, sass.Work(in_loop=False, cells=1))
    assert (counted.shortest, counted.longest) == (4, 4)


def test_work_that_no_path_does_is_an_error() -> None:
    code = sass.functions(LISTING)["_Zloop"]
    with pytest.raises(ValueError, match=r"no path with 2 loads of 16 bytes and 6 MUFU\.EX2"):
        sass.count(code, sass.Work(in_loop=True, per_load=1, marks=3))
    with pytest.raises(ValueError, match="0 stores of 16 bytes to 2 loads"):
        sass.count(code, sass.Work(in_loop=True, per_load=1, stores=True))
    with pytest.raises(ValueError, match="no loop"):
        sass.count(sass.functions(LISTING)["_Ztable"], sass.Work(in_loop=True))


def test_widths_of_loads_and_stores() -> None:
    code = sass.functions(LISTING)["_Zloop"]
    assert sass.widths(code) == "LDG 2x128, STG 1x16+1x128"


@pytest.mark.slow  # make cuda-check does it too
def test_compiled_kernels_are_within_their_budgets() -> None:
    """Of the objects that `make cuda-check` left, where they are those of the sources."""
    nvcc = cuda_check.find_nvcc()
    if nvcc is None or cuda_check.find_cuobjdump() is None:
        pytest.skip("needs nvcc and cuobjdump")
    if not cuda_check.has_budgets(nvcc):
        pytest.skip("the budgets are for another nvcc")
    faults: list[str] = []
    sources = [s for s in cuda_check.kernel_sources() if cuda_check.is_compiled(nvcc, s)]
    if not sources:
        pytest.skip("no objects of these sources: make cuda-check compiles them")
    for source in sources:
        log = cuda_check.log_of(source)
        kernels = cuda_check.read_log(log.read_text())
        faults += cuda_check.over_budget(source.stem, kernels, log.with_suffix(".fatbin"))
    assert faults == []


def test_kernel_over_its_budget_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = cuda_check.Budget(
        "loop", "x", "_Zloop", sass.Work(in_loop=True, per_load=1), shortest=3.9, longest=8
    )
    monkeypatch.setattr(cuda_check, "BUDGETS", (budget,))
    monkeypatch.setattr(cuda_check, "find_cuobjdump", lambda: "cuobjdump")
    monkeypatch.setattr(cuda_check.subprocess, "check_output", lambda *_, **__: LISTING)
    kernels = [cuda_check.Kernel("_Zloop", "sm_90a", 40, 0, 0)]
    faults = cuda_check.over_budget("x", kernels, cuda_check.ROOT / "x.o")
    assert faults == ["x: loop: 4.0 to 7.0 instructions an element, the budget is 3.9 to 8"]
    assert "40 registers, LDG 2x128, STG 1x16+1x128" in capsys.readouterr().out
