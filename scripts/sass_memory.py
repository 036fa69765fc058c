"""What a kernel's memory instructions cost by its machine code (SASS): conflicts, loads in flight.

Registers that depend on nothing but the thread's number are computed for the first warp, in the
order of the listing; uniform registers count as 0, as they move all addresses alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scripts.sass import LOAD, Instruction

WARP = 32  # threads
BANKS, WORD_BYTES = 32, 4  # of shared memory: a wavefront reads one word of each bank
WORD = 1 << 32
REGISTER = re.compile(r"\bR(\d+)\b")
SHARED = re.compile(r"\[(R\d+|RZ)?\+?(?:UR\d+\+?)?(-?0x[0-9a-f]+)?\]")
PAIRS = re.compile(r"^D[A-Z]|^CS2R|\.F64\.|\.F64$|\.WIDE")  # results of two registers
Lanes = tuple[int, ...]  # a register's value in each thread of a warp
UNIFORM: Lanes = (0,) * WARP


@dataclass(frozen=True, slots=True)
class SharedCost:
    """Shared memory's wavefronts of one warp, each instruction once.

    Args:
        least: what the same bytes take without bank conflicts.
        unknown: instructions whose addresses are not known.
    """

    wavefronts: int
    least: int
    unknown: int


def width_of(instruction: Instruction) -> int:
    """Return the bytes that a thread's load or store moves."""
    found = re.search(r"\.[US]?(8|16|64|128)(?:\.|$)", instruction.opcode)
    return int(found.group(1)) // 8 if found else WORD_BYTES


def wavefronts(addresses: Sequence[int], width: int) -> int:
    """Return the wavefronts of one instruction, by its threads' addresses in bytes.

    Threads are served in groups whose bytes fill all banks once.

    Example:
        >>> wavefronts([128 * thread for thread in range(32)], 16)
        32
        >>> wavefronts([16 * thread for thread in range(32)], 16)
        4
    """
    group = min(WARP, BANKS * WORD_BYTES // width)
    total = 0
    for first in range(0, WARP, group):
        words = {
            (address + at) // WORD_BYTES
            for address in addresses[first : first + group]
            for at in range(0, width, WORD_BYTES)
        }
        banks = [word % BANKS for word in words]
        total += max(map(banks.count, banks))
    return total


def shared_cost(code: Iterable[Instruction]) -> SharedCost:
    """Return what a kernel's accesses of shared memory cost a warp."""
    registers: dict[str, Lanes | None] = {"RZ": UNIFORM}
    total = least = unknown = 0
    for instruction in code:
        if instruction.opcode.startswith(("STS", "LDS")):
            width = width_of(instruction)
            lanes = _shared_address(instruction, registers)
            least += max(1, width * WARP // (BANKS * WORD_BYTES))
            if lanes is None:
                unknown += 1
                total += max(1, width * WARP // (BANKS * WORD_BYTES))
            else:
                total += wavefronts(lanes, width)
        _execute(instruction, registers)
    return SharedCost(total, least, unknown)


def bytes_in_flight(code: Iterable[Instruction]) -> int:
    """Return the most bytes that a thread loads from global memory before it reads one of them."""
    most = current = 0
    pending: set[int] = set()
    for instruction in code:
        named = [int(number) for number in REGISTER.findall(instruction.operands)]
        is_load = instruction.opcode.startswith(LOAD)
        waits = not pending.isdisjoint(named)
        ends = instruction.opcode.startswith(("EXIT", "RET")) and not instruction.predicate
        if waits or ends:
            current, pending = 0, set()
        if is_load:
            width = width_of(instruction)
            first = named[0]
            pending |= set(range(first, first + max(1, width // WORD_BYTES)))
            current += width
            most = max(most, current)
    return most


def _shared_address(instruction: Instruction, registers: dict[str, Lanes | None]) -> Lanes | None:
    found = SHARED.search(instruction.operands)
    if found is None:
        return None
    base, offset = found.groups()
    lanes = registers.get(base or "RZ")
    shift = int(offset, 16) if offset else 0
    return None if lanes is None else tuple(lane + shift for lane in lanes)


def _execute(instruction: Instruction, registers: dict[str, Lanes | None]) -> None:
    """Set an instruction's result where the thread's number decides it; else forget it."""
    operands = [part.strip() for part in instruction.operands.split(",")]
    target = operands[0].removesuffix(".reuse")
    if not REGISTER.fullmatch(target):
        return
    values = [_value(operand, registers) for operand in operands[1:]]
    is_pair = PAIRS.search(instruction.opcode) is not None
    for at in range(max(2 if is_pair else 1, width_of(instruction) // WORD_BYTES)):
        registers[f"R{int(target[1:]) + at}"] = None
    if instruction.predicate:
        return
    if instruction.opcode == "S2R":
        registers[target] = tuple(range(WARP)) if operands[1] == "SR_TID.X" else None
        return
    rule = next((r for name, r in _RULES.items() if _is(instruction.opcode, name)), None)
    if rule is None or None in values[: rule[0]]:
        return
    used = [value for value in values[: rule[0]] if value is not None]
    registers[target] = tuple(_signed(rule[1](*of_lane)) for of_lane in zip(*used, strict=True))


def _is(opcode: str, name: str) -> bool:
    # Variants with a suffix, such as LEA.HI, compute something else.
    return opcode == name or (name.endswith("*") and opcode.startswith(name[:-1]))


def _value(operand: str, registers: dict[str, Lanes | None]) -> Lanes | None:
    operand = operand.removesuffix(".reuse")
    sign = -1 if operand.startswith("-") else 1
    name = operand.lstrip("-")
    if re.fullmatch(r"0x[0-9a-f]+", name):
        return (_signed(sign * int(name, 16)),) * WARP
    if re.fullmatch(r"URZ?\d*|c\[.*\]", name):
        return UNIFORM
    lanes = registers.get(name)
    return None if lanes is None else tuple(sign * lane for lane in lanes)


def _signed(value: int) -> int:
    value %= WORD
    return value - WORD if value >= WORD // 2 else value


_AND = 0xC0  # the look-up table of LOP3 that is "and" of the first two


def _lop3(a: int, b: int, c: int, table: int) -> int:
    return a & b if table == _AND else 0


# By opcode: how many operands are read, and the result.
_RULES: dict[str, tuple[int, Callable[..., int]]] = {
    "MOV": (1, lambda a: a),
    "IMAD.MOV*": (3, lambda a, b, c: c),
    "IMAD.SHL*": (2, lambda a, b: a * b),
    "IMAD.IADD": (3, lambda a, b, c: a * b + c),
    "IMAD": (3, lambda a, b, c: a * b + c),
    "LEA": (3, lambda a, b, shift: (a << shift) + b),
    "LEA.HI": (4, lambda a, b, c, shift: ((a % WORD) >> (32 - shift)) + b),
    "SHF.R.S32.HI": (3, lambda low, shift, high: high >> shift),
    "SHF.R.U32.HI": (3, lambda low, shift, high: (high % WORD) >> shift),
    "SHF.L.U32": (2, lambda a, shift: a << shift),
    "LOP3.LUT": (4, _lop3),
    "VIADD": (2, lambda a, b: a + b),
    "IADD3": (3, lambda a, b, c: a + b + c),
}
