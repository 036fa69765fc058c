"""The count of a kernel's instructions for each element, on a small listing and on real objects."""

import pytest

from scripts import cuda_check, sass, sass_memory

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


def test_counted_kernels_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    loop = sass.Work(in_loop=True, per_load=1)
    other = sass.Work(in_loop=True, per_load=1, marks=3)
    kernels = tuple(cuda_check.CountedKernel("loop", "x", "_Zloop", work) for work in (loop, other))
    compiled = [
        cuda_check.Kernel("_Zloop", "sm_90a", 40, 0, 0),
        cuda_check.Kernel("_Zloop", "sm_100", 48, 0, 0),
    ]
    assert cuda_check.print_counts(kernels, compiled, lambda architecture: LISTING) == []
    first, second, newer, _ = capsys.readouterr().out.splitlines()
    counted = "4.0 to 7.0 instructions an element and 5 a thread"
    memory = "LDG 2x128, STG 1x16+1x128, 32 bytes in flight"
    assert first == f"  loop, sm_90a: {counted}, 40 registers, {memory}"
    assert newer == f"  loop, sm_100: {counted}, 48 registers, {memory}"
    assert "not counted (no path with 2 loads of 16 bytes and 6 MUFU.EX2)" in second


def test_slow_conversions_are_faults() -> None:
    converted = LISTING.replace("FADD R6, R6, R4 ;", "F2F.BF16.F32 R6, R6 ;")
    code = sass.functions(converted)["_Zloop"]
    assert cuda_check.slow_conversions("loop, sm_100", code) == [
        "loop, sm_100: expected conversions of two floats to bfloat16, got 1 of one"
    ]
    assert cuda_check.slow_conversions("loop", sass.functions(LISTING)["_Zloop"]) == []


# Each thread stores 16 bytes every 128, then reads 8 bytes of a column that 16 threads share; of
# four loads two are read before the others are issued.
MEMORY = """
		Function : _Zmemory
        /*0000*/                   S2R R3, SR_TID.X ;                     /* 0x00 */
        /*0010*/                   LDG.E R8, desc[UR4][R4.64] ;           /* 0x00 */
        /*0020*/                   LDG.E.64 R10, desc[UR4][R4.64] ;       /* 0x00 */
        /*0030*/                   IADD3 R9, R8, R10, RZ ;                /* 0x00 */
        /*0040*/                   LDG.E.U8 R6, desc[UR4][R4.64] ;        /* 0x00 */
        /*0050*/                   LDG.E.U8 R7, desc[UR4][R4.64] ;        /* 0x00 */
        /*0060*/                   LEA R2, R3.reuse, UR4, 0x7 ;           /* 0x00 */
        /*0070*/                   STS.128 [R2], R16 ;                    /* 0x00 */
        /*0080*/                   SHF.R.S32.HI R0, RZ, 0x4, R3 ;         /* 0x00 */
        /*0090*/                   LOP3.LUT R2, R3, 0xf, RZ, 0xc0, !PT ;  /* 0x00 */
        /*00a0*/                   IMAD R2, R0, 0x100, R2 ;               /* 0x00 */
        /*00b0*/                   LEA R2, R2, UR4, 0x3 ;                 /* 0x00 */
        /*00c0*/                   LDS.64 R4, [R2+0x80] ;                 /* 0x00 */
        /*00d0*/                   LDS R4, [R9] ;                         /* 0x00 */
        /*00e0*/                   EXIT ;                                 /* 0x00 */
"""


def test_bank_conflicts_are_computed_from_the_threads_addresses() -> None:
    code = sass.functions(MEMORY)["_Zmemory"]
    # 32 for the store, all of whose threads meet in four banks; the address of the last is unknown
    assert sass_memory.shared_cost(code) == sass_memory.SharedCost(32 + 2 + 1, 4 + 2 + 1, 1)


@pytest.mark.parametrize(
    ("stride", "width", "expected"),
    [(4, 4, 1), (8, 4, 2), (0, 4, 1), (128, 4, 32), (8, 8, 2), (136, 8, 2), (16, 16, 4)],
)
def test_wavefronts_of_strides(stride: int, width: int, expected: int) -> None:
    assert sass_memory.wavefronts([stride * lane for lane in range(32)], width) == expected


def test_bytes_in_flight_end_where_one_is_read() -> None:
    code = sass.functions(MEMORY)["_Zmemory"]
    assert sass_memory.bytes_in_flight(code) == 4 + 8


def test_slow_accesses_of_a_counted_kernel_are_faults() -> None:
    kernel = cuda_check.CountedKernel("sums", "x", "_Z", None, in_flight=16)
    assert cuda_check.memory_faults(kernel, 16, sass_memory.SharedCost(4, 4, 0)) == []
    assert cuda_check.memory_faults(kernel, 12, sass_memory.SharedCost(32, 4, 0)) == [
        "sums: expected 16 bytes in flight, got 12",
        "sums: expected 4 wavefronts of shared memory, got 32: bank conflicts",
    ]
