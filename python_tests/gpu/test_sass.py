"""The count of a kernel's instructions for each element, on a small listing and on real objects."""

import pytest

from scripts import cuda_check, sass

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


def test_counted_kernels_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = sass.Work(in_loop=True, per_load=1)
    other = sass.Work(in_loop=True, per_load=1, marks=3)
    kernels = tuple(cuda_check.CountedKernel("loop", "x", "_Zloop", work) for work in (loop, other))
    monkeypatch.setattr(cuda_check, "COUNTED", kernels)
    monkeypatch.setattr(cuda_check, "find_cuobjdump", lambda: "cuobjdump")
    monkeypatch.setattr(cuda_check.subprocess, "check_output", lambda *_, **__: LISTING)
    compiled = [cuda_check.Kernel("_Zloop", "sm_90a", 40, 0, 0)]
    cuda_check.print_instructions("x", compiled, cuda_check.ROOT / "x.o")
    first, second = capsys.readouterr().out.splitlines()
    counted = "4.0 to 7.0 instructions an element and 5 a thread"
    assert first == f"  loop: {counted}, 40 registers, LDG 2x128, STG 1x16+1x128"
    assert "not counted (no path with 2 loads of 16 bytes and 6 MUFU.EX2)" in second
