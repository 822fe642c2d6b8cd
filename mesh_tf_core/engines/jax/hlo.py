"""Reads compiled HLO text: collectives and their groups, how often each runs, the compiler's cycle estimates.

Plain text processing: nothing is loaded. It reads computations and their instructions, `while` loops that
count from 0 to a constant, as `lax.scan` makes them, and `estimated_cycles` of the TPU compiler.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KINDS = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
"""HLO's operations and our names."""

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8}
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?(\S+) = (.*)$")
_OPCODE = re.compile(r"(?:^|[\s)}\]])([a-z][a-z0-9-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_PLACED = re.compile(r"\b([a-z]+\d*\[[\d,]*\])\{([^}]*)\}")
HOST_SPACE = "S(5)"
"""The TPU compiler's mark of an array in the host's memory."""
COPIES = {
    "copy-start": (0, 1, 0),
    "dynamic-slice-start": (-2, 0, -2),
    "dynamic-update-slice-start": (0, 1, 1),
}
"""HLO's operations that copy in the background: positions, in the operation's type, of the written array, the
read array, and the array with the size of the copy. (A slice is read of a stack, or written to one; the last
array is no data.)"""
_CALLED = re.compile(r"\b(?:calls|to_apply|called_computation)=%?([^\s,}]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([^\s,}]+))")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
_ORDER = r"(?:, ?device_ids=\(\[[^\]]*\](?:T\([^)]*\))?\))?"
_AXES = re.compile(rf"replica_groups=mesh\[([^\]]*)\]{_ORDER} ?\{{([^}}]*)\}}")
_AXIS_SIZE = re.compile(r"'([^']+)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(-?\d+)"')
_CHAIN = re.compile(r'\bchain_id="([^"]*)"')
_LIBRARY = 'custom_call_target="tpu_custom_call"'
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One collective of the compiled program.

    Attributes:
      kind: as `program.Collective.name`.
      group_size: devices in one group; 0 if all of the program's.
      tensors: values that travel together in it.
      bytes: of all of them, as one device puts them in.
      times: how often it runs in a step.
    """

    kind: str
    group_size: int
    tensors: int
    bytes: int
    times: int


@dataclass(frozen=True)
class HloSummary:
    """The facts read off a compiled text.

    Attributes:
      cycles: sum of the estimates of everything that computes, loops counted as often as they run.
      unknown_loops: loops with an unknown number of iterations; their bodies count once.
      libraries: number of calls of a library's kernels (Pallas), for which the compiler has no estimates.
      transfers: bytes of a device that are copied from its host's memory in a step, and there, by our names.
    """

    collectives: tuple[HloCollective, ...]
    cycles: int
    unknown_loops: int
    libraries: int
    transfers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool


def read(text: str) -> HloSummary:
    """Reads the text of one compiled module."""
    return _HloReader(text).run()


class _HloReader:
    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[_Line]] = {}
        self.entry = ""
        self._parse(text)
        self.found: list[HloCollective] = []
        self.cycles = 0
        self.unknown = 0
        self.libraries = 0
        self.chains: set[str] = set()
        self.transfers: dict[str, int] = {}

    def run(self) -> HloSummary:
        if self.entry:
            self._visit(self.entry, 1, True)
        return HloSummary(tuple(self.found), self.cycles, self.unknown, self.libraries, self.transfers)

    def _parse(self, text: str) -> None:
        lines: list[_Line] | None = None
        for raw in text.splitlines():
            if lines is None:
                header = _HEADER.match(raw)
                if header:
                    lines = self.computations[header[2]] = []
                    self.entry = header[2] if header[1] else self.entry
            # Attributes of a kernel of its own may have line breaks, and a brace at the start of a line.
            elif raw.rstrip() == "}":
                lines = None
            else:
                line = _line(raw)
                if line:
                    lines.append(line)

    def _visit(self, name: str, times: int, computing: bool) -> None:
        """Walks a computation that runs `times` times; inside a fusion only collectives count."""
        lines = self.computations.get(name, [])
        types = {line.name: line.type for line in lines}
        for line in lines:
            kind = KINDS.get(line.opcode.removesuffix("-start"))
            if kind:
                if self._is_first(line):
                    size, given = _group_size(line.rest), line.operands
                    moved = sum(_bytes(types.get(name, "")) for name in given)
                    self.found.append(HloCollective(kind, size, len(given), moved, times))
                continue
            if line.opcode in COPIES:
                self._copied(line, times)
            cycles = _CYCLES.search(line.rest)
            if computing and cycles:
                self.cycles += max(0, int(cycles[1])) * times
            elif computing and _LIBRARY in line.rest:
                self.libraries += times
            if line.opcode == "while":
                self._loop(line, times, computing)
            else:
                inside = computing and line.opcode in ("call", "conditional", "async-start")
                for called in _callees(line):
                    self._visit(called, times, inside)

    def _copied(self, line: _Line, times: int) -> None:
        """Counts what is copied, if it is between the device and its host."""
        arrays = [(HOST_SPACE in placed, _bytes(type)) for type, placed in _PLACED.findall(line.type)]
        (to_host, _), (from_host, _), (_, size) = (arrays[i] for i in COPIES[line.opcode])
        if to_host is not from_host:
            name = "host_store" if to_host else "host_load"
            self.transfers[name] = self.transfers.get(name, 0) + times * size

    def _is_first(self, line: _Line) -> bool:
        """Whether this is not a further step of a collective that the compiler runs in steps under compute.

        Such steps lie in several fusions, each of which shows the whole collective with the same chain.
        """
        chain = _CHAIN.search(line.rest)
        if chain is None:
            return True
        new = chain[1] not in self.chains
        self.chains.add(chain[1])
        return new

    def _loop(self, line: _Line, times: int, computing: bool) -> None:
        names = {key: _named(key, line.rest) for key in ("condition", "body")}
        known = _TRIPS.search(line.rest)
        trips = int(known[1]) if known else self._trips(names["condition"], names["body"])
        if trips is None:
            self.unknown += 1
        self._visit(names["body"], times * (trips or 1), computing)

    def _trips(self, condition: str, body: str) -> int | None:
        """Iterations of `while (i < limit) i += step` from 0, None if it is not of that form."""
        tests = {line.name: line for line in self.computations.get(condition, ())}
        root = next((line for line in tests.values() if line.root), None)
        if root is None or root.opcode != "compare" or "direction=LT" not in root.rest:
            return None
        counter, limit = (tests.get(name) for name in root.operands)
        if counter is None or limit is None or counter.opcode != "get-tuple-element":
            return None
        bound, step = _constant(limit), self._step(body, _named("index", counter.rest))
        return None if bound is None or step is None or step <= 0 else -(-bound // step)

    def _step(self, body: str, index: str) -> int | None:
        lines = {line.name: line for line in self.computations.get(body, ())}
        root = next((line for line in lines.values() if line.root), None)
        if root is None or root.opcode != "tuple" or int(index) >= len(root.operands):
            return None
        line = lines.get(root.operands[int(index)])
        while line is not None and line.opcode in ("copy", "bitcast"):
            line = lines.get(line.operands[0])
        if line is None or line.opcode != "add":
            return None
        steps = [_constant(lines[name]) for name in line.operands if name in lines]
        return next((s for s in steps if s is not None), None)


def _line(raw: str) -> _Line | None:
    match = _INSTRUCTION.match(raw)
    if match is None:
        return None
    body = re.sub(r"/\*.*?\*/", "", match[3])
    # The first word before a parenthesis that is not a part of a type: layouts such as {1,0:T(8,128)S(1)}
    # have capital letters only before parentheses.
    opcode = _OPCODE.search(body)
    if opcode is None:
        return None
    begin, end = opcode.end(), _closing(body, opcode.end())
    operands = tuple(re.findall(r"%([^\s,()]+)", body[begin:end]))
    inner = () if operands else (body[begin:end],)
    return _Line(match[2], body[: opcode.start(1)], opcode[1], operands or inner, body[end:], bool(match[1]))


def _closing(body: str, begin: int) -> int:
    depth = 1
    for at in range(begin, len(body)):
        depth += {"(": 1, ")": -1}.get(body[at], 0)
        if not depth:
            return at
    return len(body)


def _named(key: str, text: str) -> str:
    found = re.search(rf"\b{key}=%?([^\s,}}]+)", text)
    return found[1] if found else ""


def _constant(line: _Line) -> int | None:
    value = line.operands[0] if line.opcode == "constant" and line.operands else ""
    return int(value) if re.fullmatch(r"-?\d+", value) else None


def _callees(line: _Line) -> list[str]:
    names = _CALLED.findall(line.rest)
    for several, one in _BRANCHES.findall(line.rest):
        names += [n.strip().removeprefix("%") for n in several.split(",")] if several else [one]
    return names


def _bytes(type: str) -> int:
    return sum(
        _BYTES.get(dtype, 0) * math.prod(int(n) for n in sizes.split(",") if n)
        for dtype, sizes in _SHAPE.findall(type)
    )


def _group_size(text: str) -> int:
    """Devices in the first group (all groups are alike); 0 for one group of all."""
    iota = _IOTA.search(text)
    if iota:
        return int(iota[2])
    axes = _AXES.search(text)
    if axes:  # a mesh with the axes that a group lies along, or parts of them
        sizes = dict(_AXIS_SIZE.findall(axes[1]))
        return math.prod(int(part or sizes[name]) for name, part in _GROUP_AXIS.findall(axes[2]))
    listed = _LISTED.search(text)
    if listed:
        return len(listed[1].split(","))
    pairs = _PAIRS.search(text)
    return _chain([tuple(map(int, p)) for p in re.findall(r"\{(\d+),(\d+)\}", pairs[1])]) if pairs else 0


def _chain(pairs: Sequence[tuple[int, ...]]) -> int:
    """Devices that the first sender is connected with."""
    near: dict[int, set[int]] = {}
    for a, b in pairs:
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    seen: set[int] = set()
    new = {pairs[0][0]} if pairs else set()
    while new:
        seen |= new
        new = {n for s in new for n in near[s]} - seen
    return len(seen)
