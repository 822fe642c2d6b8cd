"""Programs as JSON: a lowered program can be read, priced and run elsewhere, without the model.

    {"format": "mesh-tf-program/1", "objects": [[class, {field: value}], ...], "program": {field: value}}

A program is written field by field, each part of it under the name of its class. Frequent parts (operations,
types, origins of instructions) are objects that are written once; {"#": n} refers to object n. Fields that
have their default are left out. Reading makes values of classes that are known and nothing else: no text that
is read runs.
"""

from __future__ import annotations

import base64
import json
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import Outline
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.initializers import FixedArray
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.program import Carry, Instr, Program, Result, Sliced, Value

FORMAT = "mesh-tf-program/1"
ROOMS = ("ir", "ops", "lower", "tracing")
"""The rooms with the classes that programs are made of."""


def program_to_json(program: Program) -> dict[str, Any]:
    """A program as JSON holds it: dicts, lists, numbers, texts.

    Raises:
      UserError: a part cannot be written: a variable that a function of the model initializes, or an
        operation whose class has the name of another one.
    """
    writer = _Writer()
    return {"format": FORMAT, "program": writer.fields(program), "objects": writer.objects}


def program_from_json(content: Mapping[str, Any]) -> Program:
    """The program that `program_to_json` wrote.

    Raises:
      UserError: it is not a program, or has an operation whose class is not imported.
    """
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, Mapping) else type(content).__name__
        raise UserError(
            f"a stored program must have the format {FORMAT!r}, found {found!r}; store it again with this "
            "version"
        )
    try:
        found = _ObjectReader(content["objects"]).made("Program", content["program"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"the stored program is damaged ({type(error).__name__}: {error}); store it again"
        ) from None
    if not isinstance(found, Program):
        raise UserError(
            "the stored program is damaged (its top-level object is not a program); store it again"
        )
    return found


class _Writer:
    """Attributes: `objects` as they are written; `names` of classes; `_known`: text of an object -> its
    number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.names = {cls: name for name, cls in _classes().items()}
        self._known: dict[str, int] = {}

    def fields(self, x: Any) -> dict[str, Any]:
        """The fields of an object that differ from their defaults."""
        own = ((f, getattr(x, f.name)) for f in fields(x) if f.init)
        return {f.name: self.value(v) for f, v in own if not _is_default(f, v)}

    def value(self, x: Any) -> Any:
        """A value as JSON holds it."""
        if isinstance(x, Enum):
            return {"enum": [self.name(type(x)), x.name]}
        if x is None or isinstance(x, bool | int | str):
            return x
        if isinstance(x, float):
            return x if math.isfinite(x) else {"float": repr(x)}
        for kind, (name, write, _) in FORMS.items():
            if isinstance(x, kind):
                return {name: write(self, x)}
        if isinstance(x, tuple) and not hasattr(x, "_fields"):
            return [self.value(item) for item in x]
        return self.object(x)

    def name(self, cls: type) -> str:
        """What a class is called; UserError if it is not an operation, or has the name of another one."""
        found = self.names.get(cls)
        if found is None:
            raise UserError(
                f"a program with {cls.__module__}.{cls.__name__} cannot be stored, because this class is "
                "not an operation, or another operation has the same name; rename one of them"
            )
        return found

    def object(self, x: Any) -> Any:
        """An object by its class, or by its number."""
        if not isinstance(x, tuple) and not is_dataclass(x):
            raise UserError(
                f"a program with {x!r} of type {type(x).__name__} cannot be stored; use mtf.Normal or an "
                "array as an initializer instead of a function"
            )
        name = self.name(type(x))
        found = [name, [*x] if isinstance(x, tuple) else self.fields(x)]
        if isinstance(x, INLINE):
            return {"is": found}
        key = json.dumps(found)
        if key not in self._known:
            self._known[key] = len(self.objects)
            self.objects.append(found)
        return {"#": self._known[key]}


class _ObjectReader:
    """Attributes: `objects` as they were written; `classes` by name; `_made`: objects that were read."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects
        self.classes = _classes()
        self._made: dict[int, Any] = {}

    def value(self, x: Any) -> Any:
        """A value that JSON holds."""
        if isinstance(x, list):
            return tuple([self.value(item) for item in x])
        if not isinstance(x, dict):
            return x
        ((name, content),) = x.items()
        if name == "#":
            if content not in self._made:
                self._made[content] = self.made(*self.objects[content])
            return self._made[content]
        if name == "is":
            return self.made(*content)
        if name == "float":
            return float(content)
        if name == "enum":
            return self.classes[content[0]][content[1]]  # type: ignore[index]
        return _BY_NAME[name](self, content)

    def made(self, name: str, content: Any) -> Any:
        """An object of a class; UserError if nobody knows it."""
        found = self.classes.get(name)
        if found is None:
            raise UserError(
                f"the stored program uses an unknown class {name!r}; {known_names(name, self.classes)}; "
                f"import the module that defines {name!r} first"
            )
        if isinstance(content, list):
            return found(*[self.value(item) for item in content])
        return found(**{field: self.value(item) for field, item in content.items()})


INLINE = (Instr, Value, Carry, Sliced, Result)
"""The classes written in place: no two values are equal."""

Write = Callable[[_Writer, Any], Any]
ReadObject = Callable[[_ObjectReader, Any], Any]


def _array(read: _ObjectReader, content: Any) -> FixedArray:
    dtype, sizes, held = content
    if dtype not in ("bool", "bfloat16") and np.dtype(dtype).kind not in "fiub":
        raise ValueError(f"arrays of dtype {dtype} are not supported")
    if dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  (names the dtype to NumPy)
    return FixedArray(np.frombuffer(base64.b64decode(held), np.dtype(dtype)).reshape(sizes))


def _write_outline(write: _Writer, x: Outline) -> Any:
    """Blocks without their nodes; then their nodes, each with the number of its body."""
    body = {id(block): number for number, block in enumerate(x.blocks)}
    blocks = [write.fields(replace(block, nodes=[])) for block in x.blocks]
    nodes = [
        [[write.fields(replace(n, body=None)), n.body and body[id(n.body)]] for n in block.nodes]
        for block in x.blocks
    ]
    rest = write.fields(replace(x, blocks=()))
    return {"blocks": blocks, "nodes": nodes, "rest": rest}


def _read_outline(read: _ObjectReader, content: Any) -> Outline:
    blocks = [read.made("Block", block) for block in content["blocks"]]
    for block, nodes in zip(blocks, content["nodes"], strict=True):
        for node, body in nodes:
            made = read.made("Node", node)
            block.nodes.append(made if body is None else replace(made, body=blocks[body]))
    return replace(read.made("Outline", {**content["rest"], "blocks": []}), blocks=tuple(blocks))


FORMS: Mapping[type, tuple[str, Write, ReadObject]] = {
    Outline: ("outline", _write_outline, _read_outline),
    Fraction: ("fraction", lambda _, x: str(x), lambda _, x: Fraction(x)),
    Mesh: ("mesh", lambda _, x: str(x), lambda _, x: Mesh(x)),
    Shape: ("shape", lambda w, x: [w.value(d) for d in x.dims], lambda r, x: Shape(map(r.value, x))),
    Layout: (
        "layout",
        lambda w, x: [str(x), w.value(x.padded)],
        lambda r, x: Layout(x[0], padded=r.value(x[1])),
    ),
    FixedArray: (
        "array",
        lambda _, x: [str(x.array.dtype), x.array.shape, base64.b64encode(x.array.tobytes()).decode()],
        _array,
    ),
    frozenset: (
        "set",
        lambda w, x: sorted(map(w.value, x), key=json.dumps),
        lambda r, x: frozenset(map(r.value, x)),
    ),
    list: ("list", lambda w, x: [w.value(i) for i in x], lambda r, x: [r.value(i) for i in x]),
    Mapping: (
        "map",
        lambda w, x: [[w.value(k), w.value(v)] for k, v in x.items()],
        lambda r, x: {r.value(k): r.value(v) for k, v in x},
    ),
}
"""The types not written field by field: name, writer, reader. A layout is a mapping, so it comes before
mappings."""
_BY_NAME = {name: read for name, _, read in FORMS.values()}


def _is_default(field: Field[Any], value: Any) -> bool:
    """Whether a value is a field's default, also by its type."""
    if field.default_factory is not MISSING:
        default = field.default_factory()
    elif field.default is not MISSING:
        default = field.default
    else:
        return False
    return type(value) is type(default) and bool(value == default)


def _classes() -> Mapping[str, type]:
    """Every class that a program may be made of, by its name: those of this package, and operations that were
    imported."""
    found = dict(_own_classes())
    waiting = list[type](Op.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__module__.partition(".")[0] != __package__:
            found.setdefault(cls.__name__, cls)
    return found


@cache
def _own_classes() -> Mapping[str, type]:
    """Classes of one name have that of their module before it."""
    by_name: dict[str, dict[type, None]] = {}
    for room in ROOMS:
        package = import_module(f"{__package__}.{room}")
        for _, module, _ in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for cls in vars(import_module(module)).values():
                own = isinstance(cls, type) and cls.__module__ == module
                if own and (is_dataclass(cls) or hasattr(cls, "_fields") or issubclass(cls, Enum)):
                    by_name.setdefault(cls.__name__, {})[cls] = None
    return {
        f"{cls.__module__.rpartition('.')[2]}.{name}" if len(found) > 1 else name: cls
        for name, found in by_name.items()
        for cls in found
    }
