"""Checks that a program is well-formed: the invariants that every pass keeps."""

from collections.abc import Mapping, Sequence

from mesh_tf_core.ir import program as ir
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.lower.sums import rounds
from mesh_tf_core.ops.basic import Total


class ProgramError(AssertionError):
    """A program breaks a rule: a defect of lowering or of a pass, never of the user's input."""

    def __str__(self) -> str:
        return f"{super().__str__()}; please report this bug"


def wrong(instr: ir.Instr, text: str) -> ProgramError:
    """The error of an instruction."""
    return ProgramError(f"{instr.text()}: {text}")


def verify(program: ir.Program) -> ir.Program:
    """Returns the program, or raises ProgramError naming the instruction and the rule it breaks."""
    _Verifier(program).run()
    return program


class _Verifier:
    def __init__(self, program: ir.Program) -> None:
        self.program, self.mesh = program, program.mesh
        self.defined: set[int] = set()

    def run(self) -> None:
        for v in self.program.values:
            self.value(v)
        self.block(self.program.code)
        for name, i in self.program.results.items():
            if i not in self.defined:
                raise ProgramError(f"result {name!r}: %{i} is not computed")
            if self.program.values[i].partial:
                raise ProgramError(f"result {name!r}: %{i} still has pending sums")

    def value(self, v: ir.Value) -> None:
        if len(v.splits) != len(v.shape):
            raise ProgramError(
                f"%{v.id}: the number of splits differs from the number of dimensions: {v.splits} for "
                f"[{v.shape}]"
            )
        used = [a for axes in v.splits for a in axes]
        if len(used) != len(set(used)):
            raise ProgramError(f"%{v.id}: an axis splits two dimensions: {v}")
        if set(used) & set(v.partial):
            raise ProgramError(f"%{v.id}: the value is both split and a pending sum over the same axis: {v}")
        for d, axes in zip(v.shape, v.splits, strict=True):
            if d.size % self.mesh.group_size(axes) != 0:
                raise ProgramError(f"%{v.id}: the size of {d} is not divisible by the devices of {axes}")

    def block(self, code: Sequence[ir.Instr]) -> None:
        going: dict[int, ir.Message] = {}
        for instr in code:
            self.in_order(instr, going)
            for i in instr.inputs:
                if i not in self.defined:
                    raise wrong(instr, f"input %{i} is not computed before this instruction")
            if isinstance(instr, ir.Loop):
                self.loop(instr)
            else:
                self.instr(instr)
            for o in instr.outputs:
                if o in self.defined:
                    raise wrong(instr, f"%{o} is computed twice")
                self.defined.add(o)
        for i, message in going.items():
            raise wrong(message, f"no instruction of the block waits for %{i}")

    def in_order(self, instr: ir.Instr, going: dict[int, ir.Message]) -> None:
        """What a message brings is waited for once, in the message's block, and read after that."""
        if isinstance(instr, ir.Done):
            for i in instr.inputs:
                message = going.pop(i, None)
                if message is None or message.name != instr.message:
                    raise wrong(instr, f"no matching start instruction for %{i}")
        elif going and (early := [i for i in instr.inputs if i in going]):
            raise wrong(instr, f"%{early[0]} is read before its communication has finished")
        elif isinstance(instr, ir.Message) and instr.rule:
            going.update(dict.fromkeys(instr.outputs, instr))

    def loop(self, loop: ir.Loop) -> None:
        values = self.program.values
        outside = set(self.defined)
        self.defined.update((loop.index, *loop.entering))
        if loop.runs is not None:
            if loop.runs not in self.defined or loop.runs == loop.index:
                raise wrong(loop, f"the condition %{loop.runs} is not computed before the iteration")
            decides = values[loop.runs]
            scalar = decides.dtype == "bool" and not len(decides.shape) and not decides.partial
            if not scalar:
                raise wrong(loop, f"the condition %{loop.runs} must be a bool scalar without pending sums")
        first = None if loop.first is None else values[loop.first]
        if first is not None and (first.dtype != "int32" or len(first.shape)):
            raise wrong(loop, f"the first index %{loop.first} must be an int32 scalar")
        self.block(loop.body)
        for stack in (*(s.outer for s in loop.sliced), *(r.outer for r in loop.stacked)):
            if loop.first is None and loop.offset is None and values[stack].shape.sizes[0] != loop.dim.size:
                raise wrong(loop, f"the length of %{stack} differs from the number of iterations")
        for outer, inner in loop.sliced:
            if values[outer].host != values[inner].host:
                raise wrong(
                    loop,
                    f"the slice %{inner} and its stack %{outer} are not both on the device "
                    "or both on the host",
                )
        for c in loop.carried:
            kinds = {(values[i].shape, values[i].dtype, values[i].splits) for i in c}
            if len(kinds) != 1:
                raise wrong(
                    loop, f"the carried value %{c.init} changes its type or placement between iterations"
                )
            if len({values[i].partial for i in c}) != 1:
                raise wrong(
                    loop,
                    f"the carried value %{c.leave} has other pending sums after an iteration than before",
                )
            if c.leave not in self.defined:
                raise wrong(loop, f"the carried value %{c.leave} is not computed")
        handed = ("stack", "stacked", "slice", loop.stacked), ("sum", "summed", "term", loop.summed)
        for whole, made, part, results in handed:
            for inner, outer in results:
                if inner not in self.defined:
                    raise wrong(loop, f"the {made} value %{inner} is not computed")
                v, of_all = values[inner], values[outer]
                splits = ((), *v.splits) if whole == "stack" else v.splits
                if (of_all.splits, of_all.partial, of_all.host) != (splits, v.partial, v.host):
                    both = f"the {whole} %{outer} and its {part} %{inner}"
                    raise wrong(loop, f"{both} have different placements")
        self.defined = outside

    def instr(self, instr: ir.Instr) -> None:
        if not isinstance(instr, ir.Transfer | ir.Done | ir.ReadVariable | ir.WriteVariable):
            there = [i for i in (*instr.inputs, *instr.outputs) if self.of(i).host]
            renames = isinstance(instr, ir.Local) and instr.op.free and len(instr.inputs) == 1
            if there and not (renames and len(there) == 2):
                raise wrong(instr, f"%{there[0]} is on the host, but this instruction runs on the device")
        if isinstance(instr, ir.Local):
            self.local(instr)
        elif isinstance(instr, ir.Collective):
            self.collective(instr)
        elif isinstance(instr, ir.Slice):
            self.moves(instr, instr.inputs[0], instr.outputs[0], {instr.dim: (1, instr.axes)})
        elif isinstance(instr, ir.Transfer):
            self.moves(instr, instr.inputs[0], instr.outputs[0], {})
            loads = isinstance(instr, ir.HostLoad)
            if (self.of(instr.inputs[0]).host, self.of(instr.outputs[0]).host) != (loads, not loads):
                raise wrong(
                    instr,
                    f"%{instr.inputs[0]} or the result is on the wrong side of the transfer "
                    "between host and device",
                )
        elif isinstance(instr, ir.ReadVariable):
            if self.of(instr.outputs[0]).host != self.program.variables[instr.variable].host:
                raise wrong(
                    instr,
                    f"%{instr.outputs[0]} and the variable are not both on the device or both on the host",
                )
        elif isinstance(instr, ir.WriteVariable):
            stored = self.program.variables[instr.variable]
            written = self.of(instr.inputs[0])
            if (written.splits, written.host) != (stored.splits, stored.host) or written.partial:
                raise wrong(
                    instr, f"%{written.id} does not have the placement in which the variable is stored"
                )

    def collective(self, instr: ir.Collective) -> None:
        """Values are split afterwards as the kind says, and what it adds up is pending over its axes."""
        try:
            change = instr.resplits()
        except NotImplementedError:
            raise wrong(instr, "no rule covers operands of these types") from None
        for i, o in zip(instr.inputs, instr.outputs, strict=True):
            if instr.sums and set(instr.axes) != set(self.of(i).partial) - set(self.of(o).partial):
                raise wrong(
                    instr,
                    f"the axes of the sum differ from the axes of the pending sum in %{i}: {self.of(i)}",
                )
            self.moves(instr, i, o, change)

    def of(self, i: int) -> ir.Value:
        return self.program.values[i]

    def local(self, instr: ir.Local) -> None:
        """Pending sums enter linear operations only, all operands alike; splits agree with the roles."""
        if isinstance(instr.op, Total):
            self.total(instr, instr.op)
            return
        adds = instr.op.adds
        terms = instr.inputs[:-1] if adds else instr.inputs
        partial = {self.of(i).partial for i in terms if not self.is_number(i, instr)}
        if adds and self.of(instr.inputs[-1]).partial != self.of(instr.outputs[0]).partial:
            raise wrong(instr, "the operand that is added has a pending sum over other axes than the result")
        if any(partial):
            if not (instr.op.linear or rounds(instr.op, self.of(instr.outputs[0]).dtype)):
                raise wrong(instr, "an operand is a pending sum, but the operation is not linear")
            if len(partial) != 1:
                raise wrong(instr, f"operands have pending sums over different axes: {partial}")
        sides = (instr.inputs, instr.outputs) if instr.op.regroups else ((*instr.inputs, *instr.outputs),)
        for side in sides:
            self.one_owner(instr, side)
        if not instr.op.regroups:
            self.role(instr, set().union(*partial))

    def is_number(self, id: int, instr: ir.Local) -> bool:
        """Whether an operand of a linear operation is not a term, but a number that all devices have."""
        v = self.of(id)
        whole = v.dtype == "int32" and not len(v.shape) and not v.partial
        return instr.op.linear and whole and self.of(instr.outputs[0]).dtype != "int32"

    def total(self, instr: ir.Local, op: Total) -> None:
        """Each device counts its share of what those that its result is added to have, too."""
        pending = set(self.of(instr.outputs[0]).partial)
        for i, share in zip(instr.inputs, op.shares or (1,) * len(instr.inputs), strict=True):
            own = set(self.of(i).partial)
            same = self.mesh.group_size(tuple(pending - own))
            if not own <= pending or share != same:
                raise wrong(instr, f"adds 1/{share} of %{i}, but {same} of the summed devices hold a copy")

    def one_owner(self, instr: ir.Local, ids: Sequence[int]) -> None:
        """One axis splits one dimension, a dimension is split alike wherever it occurs."""
        owner: dict[str, str] = {}
        for i in ids:
            v = self.of(i)
            for name, axes in zip(v.shape.names, v.splits, strict=True):
                for axis in axes:
                    same = owner.setdefault(axis, name) == name
                    if not same:
                        raise wrong(instr, f"axis {axis} splits two dimensions")

    def role(self, instr: ir.Local, pending: set[str]) -> None:
        """What the operation needs whole is whole; what it sums out over split pieces is partial
        afterwards."""
        types = [TensorType(self.of(i).shape, self.of(i).dtype) for i in instr.inputs]
        roles = instr.op.roles(*types)
        splits: dict[str, Axes] = {}
        for i in (*instr.inputs, *instr.outputs):
            for name, axes in zip(self.of(i).shape.names, self.of(i).splits, strict=True):
                if splits.setdefault(name, axes) != axes:
                    raise wrong(instr, f"operands split {name!r} over different axes")
        for name, axes in splits.items():
            if not (not axes or name not in roles.whole):
                raise wrong(instr, f"{name!r} is split, but the operation needs all of it on every device")
        reduced = roles.reduced if roles.combine == "sum" else ()
        for o in instr.outputs:
            lacking = (splits.get(name, ()) for name in reduced if name not in self.of(o).shape.names)
            left = pending.union(*lacking)
            if set(self.of(o).partial) != left:
                raise wrong(
                    instr,
                    f"the result needs a pending sum over {sorted(left)}, but %{o} has one "
                    f"over {self.of(o).partial}",
                )

    def moves(self, instr: ir.Instr, i: int, o: int, change: Mapping[str, tuple[int, Axes]]) -> None:
        """Input and output differ just in the splits of the dimensions named."""
        a, b = self.of(i), self.of(o)
        if not (a.shape == b.shape and a.dtype == b.dtype):
            raise wrong(instr, f"%{i} and the result have different types")
        for name, before, after in zip(a.shape.names, a.splits, b.splits, strict=True):
            sign, axes = change.get(name, (0, ()))
            expected = (*before, *axes) if sign > 0 else before[: len(before) - len(axes)] if sign else before
            if after != tuple(expected):
                raise wrong(instr, f"the split of {name!r} must not change from {before} to {after}")
