"""Count the instructions that a kernel issues for each element, in its machine code (SASS).

The count is of a path through the control-flow graph: through one pass of the innermost loop with
16-byte loads, or from a kernel's first instruction to its end. Edges that close a loop are left
out, so that every loop on the path runs once. Of the paths that do all the work, that is

1. the most 16-byte loads, each of which brings `per_load` elements,
2. for each element `marks` instructions of the operation `mark`, its exponential, and
3. then the most 16-byte stores,

the shortest and the longest are reported. They differ by branches that few warps take, such as that
of the one thread which finishes a row. Instructions with a false predicate count, as they are
issued; a call counts its function's shortest or longest path; `BRA.DIV`, for warps whose threads
have diverged before a shuffle, counts as not taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
FUNCTION = re.compile(r"^\s*Function : (\S+)")
ADDRESS = re.compile(r"0x([0-9a-f]+)\s*$")
LOAD, STORE = "LDG.E", "STG.E"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of SASS."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def is_wide(self) -> bool:
        """Return whether it moves 16 bytes per thread."""
        return ".128" in self.opcode

    @property
    def target(self) -> int | None:
        """Return the address that a branch or a call names."""
        found = ADDRESS.search(self.operands)
        return int(found.group(1), 16) if found else None


@dataclass(frozen=True, slots=True)
class Work:
    """What a path must do for each vector that it loads."""

    in_loop: bool  # one pass of the innermost loop; else from the first instruction to the last
    per_load: int = 8  # elements of a 16-byte load
    marks: float = 1  # instructions `mark` of an element; a fraction, if several share one
    mark: str = "MUFU.EX2"
    stores: bool = False  # as many stores of 16 bytes as loads
    # where cells are not loaded 16 bytes at a time: how many one pass handles
    cells: int | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """Instructions of the shortest and the longest path that does the work."""

    shortest: int
    longest: int
    elements: int
    loads: int  # of 16 bytes
    stores: int  # of 16 bytes
    outside: int = 0  # instructions of the shortest path outside the loop, for all passes together

    @property
    def per_element(self) -> tuple[float, float]:
        """Return both, divided by the elements."""
        return self.shortest / self.elements, self.longest / self.elements


@dataclass(slots=True)
class Block:
    """Instructions without a branch between them."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)  # addresses; none: the kernel ends
    ends: bool = False  # a thread may end here, or return

    def count(self, test: Callable[[Instruction], bool]) -> int:
        """Return how many instructions satisfy `test`."""
        return sum(map(test, self.instructions))

    @property
    def loads(self) -> int:
        """Return its 16-byte loads."""
        return self.count(lambda i: i.opcode.startswith(LOAD) and i.is_wide)

    @property
    def stores(self) -> int:
        """Return its 16-byte stores."""
        return self.count(lambda i: i.opcode.startswith(STORE) and i.is_wide)

    def marks(self, work: Work) -> int:
        """Return its instructions that show that an element is handled."""
        return self.count(lambda i: i.opcode == work.mark)


Graph = dict[int, Block]
# Of a path's rest, (loads, stores, marks) to its shortest and longest number of instructions
States = dict[tuple[int, int, int], tuple[int, int]]


def functions(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each function in the output of `cuobjdump -sass`."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            current = found[match.group(1)] = []
        elif match := INSTRUCTION.match(line):
            address, predicate, opcode, operands = match.groups()
            current.append(
                Instruction(int(address, 16), (predicate or "").strip(), opcode, operands.strip())
            )
    return found


def widths(code: Iterable[Instruction]) -> str:
    """Return how many global loads and stores there are of each width in bits."""
    parts = []
    for name in (LOAD, STORE):
        sizes: dict[str, int] = {}
        for instruction in code:
            if instruction.opcode.startswith(name):
                found = re.search(r"\.[US]?(8|16|64|128)(?:\.|$)", instruction.opcode)
                size = found.group(1) if found else "32"
                sizes[size] = sizes.get(size, 0) + 1
        listed = "+".join(
            f"{n}x{size}" for size, n in sorted(sizes.items(), key=lambda s: int(s[0]))
        )
        parts.append(f"{name[:3]} {listed or 'none'}")
    return ", ".join(parts)


def graph_of(code: list[Instruction]) -> Graph:
    """Return the blocks of a function by the address of their first instruction."""
    starts = {code[0].address}
    for instruction, after in zip(code, [*code[1:], None], strict=True):
        if _is_jump(instruction):
            starts.update(_targets(instruction))
            if after is not None:
                starts.add(after.address)
        elif instruction.opcode.startswith("CALL") and instruction.target is not None:
            starts.add(instruction.target)
    graph: Graph = {}
    block = Block()
    for instruction, after in zip(code, [*code[1:], None], strict=True):
        if instruction.address in starts:
            block = graph[instruction.address] = Block()
        block.instructions.append(instruction)
        if _is_jump(instruction):
            block.successors += _targets(instruction)
            block.ends = instruction.opcode.startswith(("EXIT", "RET"))
            falls = _is_conditional(instruction)
        else:
            falls = after is not None and after.address in starts
        if falls and after is not None:
            block.successors.append(after.address)
    _link_tables(graph, code)
    return graph


def _link_tables(graph: Graph, code: list[Instruction]) -> None:
    """Add the targets of jumps through a table, which the listing leaves out.

    They are the blocks without another way in, between such a jump and the next one.
    """
    reached = {code[0].address} | {s for block in graph.values() for s in block.successors}
    reached |= {i.target for i in code if i.opcode.startswith("CALL") and i.target is not None}
    table: Block | None = None
    for at in sorted(graph):
        if at not in reached and table is not None:
            table.successors.append(at)
        if graph[at].instructions[-1].opcode.startswith("BRX"):
            table = graph[at]
        elif graph[at].ends:
            table = None


def _is_jump(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("BRA", "BRX", "EXIT", "RET", "JMP"))


def _targets(instruction: Instruction) -> list[int]:
    if instruction.opcode.startswith(("EXIT", "RET", "BRA.DIV", "BRX")):
        return []
    return [] if instruction.target is None else [instruction.target]


def _is_conditional(instruction: Instruction) -> bool:
    has_condition = "," in instruction.operands and instruction.opcode.startswith("BRA")
    return bool(instruction.predicate) or has_condition or instruction.opcode.startswith("BRA.DIV")


def without_loops(graph: Graph, entry: int) -> tuple[list[int], set[tuple[int, int]]]:
    """Return the blocks in an order in which edges lead forward, and the edges that close loops."""
    order: list[int] = []
    closing: set[tuple[int, int]] = set()
    state: dict[int, int] = {}  # 1: on the stack, 2: done
    stack = [(entry, iter(graph[entry].successors))]
    state[entry] = 1
    while stack:
        at, rest = stack[-1]
        following = next(rest, None)
        if following is None:
            state[at] = 2
            order.append(at)
            stack.pop()
        elif state.get(following) == 1:
            closing.add((at, following))
        elif following not in state and following in graph:
            state[following] = 1
            stack.append((following, iter(graph[following].successors)))
    return order[::-1], closing


def loops(graph: Graph, closing: set[tuple[int, int]]) -> dict[int, set[int]]:
    """Return the blocks of each loop by the address of its first block."""
    before: dict[int, list[int]] = {at: [] for at in graph}
    for at, block in graph.items():
        for following in block.successors:
            if following in before:
                before[following].append(at)
    bodies: dict[int, set[int]] = {}
    for last, first in closing:
        body = bodies.setdefault(first, {first})
        waiting = [last]
        while waiting:
            at = waiting.pop()
            if at not in body:
                body.add(at)
                waiting += before[at]
    return bodies


def count(code: list[Instruction], work: Work) -> Count:
    """Return the instructions of the paths that do all the work.

    Raises:
        ValueError: no loop, or no path, that does it.
    """
    graph = graph_of(code)
    entry = code[0].address
    order, closing = without_loops(graph, entry)
    if not work.in_loop:
        return _paths(graph, order, closing, work, entry, set(order), None)
    bodies = loops(graph, closing)
    wide = {first: body for first, body in bodies.items() if _does_work(graph, body, work)}
    inner = [
        first
        for first, body in wide.items()
        if not any(other != first and other in body for other in wide)
    ]
    found: list[Count] = []
    faults = ["no loop loads or stores elements"]
    for first in inner:
        try:
            found.append(_paths(graph, order, closing, work, first, wide[first], first))
        except ValueError as fault:  # another loop may do it
            faults.append(str(fault))
    if not found:
        raise ValueError(faults[-1])
    best = max(found, key=lambda c: (c.elements, -c.shortest))
    if work.cells is not None:
        return best
    once = _paths(graph, order, closing, work, entry, set(order), None)
    return replace(best, outside=once.shortest - best.shortest)


def _does_work(graph: Graph, body: set[int], work: Work) -> bool:
    if work.cells is None:
        return any(graph[at].loads for at in body)
    has_loads = any(graph[at].count(lambda i: i.opcode.startswith(LOAD)) for at in body)
    return has_loads and any(graph[at].marks(work) for at in body)


def _paths(
    graph: Graph,
    order: list[int],
    closing: set[tuple[int, int]],
    work: Work,
    first: int,
    body: set[int],
    loop: int | None,
) -> Count:
    """Count from `first` to the kernel's end, or to the edge that closes `loop`."""
    order = [at for at in order if at in body]
    edges = {
        at: [s for s in graph[at].successors if s in body and (at, s) not in closing]
        for at in order
    }

    def is_last(at: int) -> bool:
        return graph[at].ends if loop is None else (at, loop) in closing

    most: dict[int, int] = {}
    for at in reversed(order):
        rest = [most[s] for s in edges[at] if s in most]
        if rest or is_last(at):
            most[at] = graph[at].loads + max([*rest, *([0] if is_last(at) else [])])
    loads = most[first]
    elements = loads * work.per_load if work.cells is None else work.cells
    needed = int(elements * work.marks)
    ahead = {first: 0}  # the most loads before a block: what cannot reach `loads` is dropped
    for at in order:
        for following in edges[at]:
            so_far = ahead.get(at, -1) + graph[at].loads
            ahead[following] = max(ahead.get(following, -1), so_far)
    states: dict[int, States] = {}
    for at in reversed(order):
        block = graph[at]
        fewest, greatest = _length(graph, block)
        marks = block.marks(work)
        mine: States = {}
        rests: list[States] = [states[s] for s in edges[at]]
        if is_last(at):
            rests.append({(0, 0, 0): (0, 0)})
        for rest in rests:
            for (num_loads, num_stores, num_marks), (low, high) in rest.items():
                key = (
                    num_loads + block.loads,
                    num_stores + block.stores,
                    min(needed, num_marks + marks),
                )
                if ahead.get(at, -1) + key[0] < loads:
                    continue
                old = mine.get(key, (low + fewest, high + greatest))
                mine[key] = (min(old[0], low + fewest), max(old[1], high + greatest))
        states[at] = mine
    done = {k: v for k, v in states[first].items() if k[0] == loads and k[2] == needed}
    if not done:
        raise ValueError(f"no path with {loads} loads of 16 bytes and {needed} {work.mark}")
    stores = max(s for _, s, _ in done)
    if work.stores and stores < loads:
        raise ValueError(f"{stores} stores of 16 bytes to {loads} loads")
    ranges = [v for (_, s, _), v in done.items() if s == stores]
    return Count(min(r[0] for r in ranges), max(r[1] for r in ranges), elements, loads, stores)


def _length(graph: Graph, block: Block) -> tuple[int, int]:
    """Return a block's instructions with those of the functions that it calls."""
    fewest = greatest = len(block.instructions)
    for instruction in block.instructions:
        if instruction.opcode.startswith("CALL") and instruction.target in graph:
            low, high = _function_length(graph, instruction.target)
            fewest, greatest = fewest + low, greatest + high
    return fewest, greatest


def _function_length(graph: Graph, entry: int) -> tuple[int, int]:
    order, closing = without_loops(graph, entry)
    lengths: dict[int, tuple[int, int]] = {}
    for at in reversed(order):
        block = graph[at]
        rest = [lengths[s] for s in block.successors if (at, s) not in closing and s in lengths]
        if block.ends:
            rest.append((0, 0))
        if rest:
            size = len(block.instructions)
            lengths[at] = (size + min(r[0] for r in rest), size + max(r[1] for r in rest))
    return lengths[entry]
