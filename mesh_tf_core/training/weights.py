"""Weights from elsewhere: arrays by name, `.npz` and safetensors files, checkpoints, into variables.

A safetensors file is mapped into memory, so that no array is held whole; the variables of a stack of layers,
which have a dimension that counts them, are put together layer by layer.

Every number that a variable takes is looked at before the first one is set. A weight must be finite, and the
variable's dtype must hold it: a float may be rounded to a narrower float, but not beyond its range; any other
conversion (a whole number to a float, a float to a whole number, to fewer bits) must be exact.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from mesh_tf_core.arguments import PATH, ArgumentKind, check, instance, is_iterable
from mesh_tf_core.engines import Cluster, Engine
from mesh_tf_core.engines.feeds import are_numbers, holds
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.files import write_file
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.program import Program
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.reading import reading
from mesh_tf_core.training import array_files, checkpoint

GivenWeights = Mapping[str, Any] | str | Path | Sequence[str | Path]
"""Arrays by name; a .npz or .safetensors file, several of them, or a directory of safetensors files or of
checkpoints."""
WEIGHTS = ArgumentKind(
    PATH.holds,
    "a dict of arrays, one or more .npz or .safetensors files, or a directory of safetensors files or "
    "checkpoints",
)
NAMES = instance(Mapping, "a dict from variables to the names of their weights")
ARRAYS = ArgumentKind(
    lambda name: isinstance(name, str) or (isinstance(name, tuple) and all(isinstance(n, str) for n in name)),
    "the name of an array, or a tuple of names",
)
PIECE = 1 << 18
"""Numbers that are looked at at once: they stay in the processor's cache."""
_PIECEWISE: tuple[Literal["external_loop", "buffered", "zerosize_ok"], ...] = (
    "external_loop",
    "buffered",
    "zerosize_ok",
)


@dataclass(frozen=True)
class Source:
    """The arrays from which a variable's weights are read.

    Attributes:
      name: name of the array. For a stack of layers: a name with `{}` for the layer's number, or all names (a
        variable [layers, experts, ...] may have one array for each expert of each layer, in this order).
      transpose: order of the array's axes, as in `np.transpose`. The array may then join axes that the
        variable separates, such as heads and their width, or separate axes that the variable joins.
    """

    name: str | tuple[str, ...]
    transpose: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check("Source", name=(self.name, ARRAYS))


NAME = instance((str, Source), "the name of a weight, or an mtf.Source")


def _is_pattern(text: Any) -> bool:
    with contextlib.suppress(re.error, TypeError):
        return bool(re.compile(text)) and isinstance(text, str)
    return False


PATTERN = ArgumentKind(_is_pattern, "a regular expression as a string")


@dataclass(frozen=True)
class LoadedWeights:
    """The result of loading weights.

    Attributes:
      variables: with new values; `new`: with their initial values.
      unused: weights that no variable took.
    """

    variables: tuple[str, ...]
    new: tuple[str, ...]
    unused: tuple[str, ...]


def read_weights(
    variables: Iterable[Variable],
    weights: GivenWeights,
    names: Mapping[str, str | Source],
    new: str = "",
    cluster: Cluster | None = None,
) -> tuple[Iterator[tuple[str, Any]], LoadedWeights]:
    """Every variable's array, read on access, and the names of loaded variables. All is checked before.

    Args:
      variables: of the model, without those of optimizers and the step.
      names: variable -> the source of its weights; other variables have their own names there.
      new: regular expression; variables whose names contain a match need no weights.
      cluster: the processes that load together; each looks at the numbers of some arrays, for all.

    Raises:
      UserError: variables without weights, or weights of another shape or that a variable cannot hold, all of
        them named; files that are damaged.
    """
    check("load", names=(names, NAMES), new=(new, PATTERN))
    arrays = _arrays(weights)
    wanted = {v.name: v for v in variables if v.slot_of is None and v.name != "step"}
    for name in names:
        if name not in wanted:
            raise UserError(f"load: {name!r} in `names` is not a variable; {known_names(name, wanted)}")
    found: dict[str, _Parts] = {}
    missing: list[str] = []
    wrong: list[str] = []
    for variable in wanted.values():
        given = names.get(variable.name, variable.name)
        check("load", names=(given, NAME))
        source = Source(given) if isinstance(given, str) else given
        parts = _parts(variable, source)
        absent = [name for name in parts.names if name not in arrays]
        if not absent:
            found[variable.name] = parts
            arrays.update({name: _given(name, arrays[name]) for name in parts.names})
            wrong += _misfits(variable, parts, arrays)
        elif variable.name in names or not (new and re.search(new, variable.name)):
            missing.append(f"{variable.name!r} (looked for {absent[0]!r})")
    if missing or wrong:
        said = [f"no weights for {', '.join(missing)}"] if missing else []
        there = ", ".join(list(arrays)[:3])
        hint = (
            f"; the weights contain {there} and others; map them with names=, or list variables that "
            "keep their initial values with new="
        )
        raise UserError(f"load: {'; '.join([*said, *wrong])}{hint if missing else ''}")
    _check_numbers({wanted[name]: parts for name, parts in found.items()}, arrays, cluster)
    taken = {name for parts in found.values() for name in parts.names}
    kept, unused = (n for n in wanted if n not in found), (n for n in arrays if n not in taken)
    loaded = LoadedWeights(tuple(found), tuple(kept), tuple(unused))
    made = ((name, _made(wanted[name], parts, arrays)) for name, parts in found.items())
    return made, loaded


def write_weights(path: str | Path, variables: Mapping[str, Variable], read: Callable[[str], Any]) -> None:
    """Writes arrays into a .npz or .safetensors file, under a temporary name first. One is held at a time.

    Args:
      variables: the variables of the arrays, by their names in the file.
      read: name of a variable -> its array; called in this order.
    """
    check("save_weights", path=(path, PATH))
    write = {".npz": _npz, ".safetensors": _safetensors}.get(Path(path).suffix)
    if write is None:
        raise UserError(f"save_weights: {str(path)!r} must end in .npz or .safetensors")
    write_file(path, partial(write, variables, read), "the weights")


def write_trained(
    path: str | Path,
    program: Program,
    means: Mapping[str, Variable],
    engine: Engine,
    read: Callable[[str], Any] | None = None,
) -> None:
    """Writes the variables of a training without the optimizer's; all processes of a job do it together.

    Args:
      means: variable -> the variable that is written instead.
      read: name of a written variable -> its array; by default the engine's.
    """
    read = engine.read if read is None else read
    kept = [s.variable for s in program.variables.values() if s.variable.slot_of is None]
    found = {v.name: means.get(v.name, v) for v in kept if v.name != "step"}
    if engine.is_chief:
        write_weights(path, found, read)
        return
    for variable in found.values():  # whose pieces all processes bring together
        read(variable.name)


def _safetensors(variables: Mapping[str, Variable], read: Callable[[str], Any], file: BinaryIO) -> None:
    file.write(array_files.header({name: (v.dtype, v.shape.sizes) for name, v in variables.items()}))
    for v in variables.values():
        file.write(array_files.flat(np.asarray(read(v.name), np_dtype(v.dtype))))


def _npz(variables: Mapping[str, Variable], read: Callable[[str], Any], file: BinaryIO) -> None:
    # These files have no bfloat16; float32 has all its numbers.
    dtypes = {
        name: "float32" if v.dtype == "bfloat16" else np_dtype(v.dtype) for name, v in variables.items()
    }
    made = ((name, np.asarray(read(v.name), dtypes[name])) for name, v in variables.items())
    array_files.write_npz(file, made)


# -- where weights are ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    """An array that is read when it is needed.

    Attributes:
      dtype: NumPy's.
    """

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], Any]


def _arrays(weights: GivenWeights) -> dict[str, Any]:
    """Arrays as they are given, or as `_Array`."""
    if isinstance(weights, Mapping):
        return dict(weights)
    if not is_iterable(weights):
        check("load", weights=(weights, WEIGHTS))
    if isinstance(weights, Iterable) and not isinstance(weights, str):
        return {name: array for path in weights for name, array in _arrays(path).items()}
    path = Path(weights)
    with reading(f"load: {str(path)!r}", "give a complete file"):
        if path.is_dir():
            files = sorted(path.glob("*.safetensors"))
            return _arrays(files) if files else _checkpointed(path)
        if path.suffix == ".npz":
            archive = array_files.zipped(path)
            return {name: _Array(entry.shape, entry.dtype, entry.read) for name, entry in archive.items()}
        if path.suffix == ".safetensors":
            found = array_files.places(path)
            return {name: _Array(p.shape, np_dtype(p.dtype), p.mapped) for name, p in found.items()}
    raise UserError(f"load: {str(path)!r} is neither a .npz or .safetensors file nor a directory")


def _given(name: str, array: Any) -> _Array:
    if isinstance(array, _Array):
        return array
    try:
        dtype = getattr(array, "dtype", None)
        dtype = dtype if isinstance(dtype, np.dtype) else np.asarray(array).dtype
        return _Array(tuple(np.shape(array)), dtype, partial(np.asarray, array))
    except Exception as error:  # as many kinds as there are things that are not arrays
        why = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise UserError(
            f"load: {name!r} cannot be converted to an array ({why}); give a dict of arrays"
        ) from None


def _checkpointed(path: Path) -> dict[str, _Array]:
    found = checkpoint.newest(path)
    if found is None:
        raise UserError(
            f"load: the directory {str(path)!r} contains neither safetensors files nor a checkpoint"
        )
    return {
        name: _Array(entry.shape, np_dtype(entry.dtype), partial(found.read, name))
        for name, entry in found.variables.items()
    }


# -- what a variable takes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parts:
    """The arrays that make up a variable, and the shape of each when it is transposed."""

    names: tuple[str, ...]
    transpose: tuple[int, ...]
    shape: tuple[int, ...]


def _parts(variable: Variable, source: Source) -> _Parts:
    """The arrays of every layer of a stack, row by row; the one of any other variable."""
    sizes = variable.shape.sizes
    if isinstance(source.name, tuple):
        count, most = len(source.name), variable.stacked + 1
        fits = [n for n in range(most + 1) if math.prod(sizes[:n]) == count]
        if not fits:
            raise UserError(
                f"load: names has {count} arrays for {variable.name!r} [{variable.shape}]; give one "
                "array for each layer, or one for each index of the first two dimensions"
            )
        return _Parts(source.name, source.transpose, sizes[fits[-1] :])
    first, *others = source.name.split("{}")
    counted = len(others)
    if counted > variable.stacked:
        raise UserError(
            f"load: {source.name!r} has {counted} placeholders {{}}, but {variable.name!r} "
            f"[{variable.shape}] has only {variable.stacked} stacked dimensions; use one placeholder for each"
        )
    names = tuple(
        first + "".join(f"{n}{text}" for n, text in zip(at, others, strict=True))
        for at in np.ndindex(*sizes[:counted])
    )
    return _Parts(names, source.transpose, sizes[counted:])


def _misfits(variable: Variable, parts: _Parts, arrays: Mapping[str, _Array]) -> Iterator[str]:
    turned = bool(parts.transpose)
    for name in parts.names:
        shape, dtype = arrays[name].shape, arrays[name].dtype
        if not are_numbers(dtype):
            yield f"{variable.name!r} needs real numbers, but {name!r} has dtype {dtype}"
        elif turned and sorted(parts.transpose) != list(range(len(shape))):
            yield (
                f"{name!r} has shape {list(shape)}, for which transpose={parts.transpose} is not a "
                "permutation of the axes"
            )
        elif shape != parts.shape and not (turned and math.prod(shape) == math.prod(parts.shape)):
            yield (
                f"{variable.name!r} [{variable.shape}] needs an array of shape {list(parts.shape)}, but "
                f"{name!r} has shape {list(shape)}"
            )


def _check_numbers(
    found: Mapping[Variable, _Parts], arrays: Mapping[str, _Array], cluster: Cluster | None
) -> None:
    """UserError, naming all, where a variable cannot hold a number of its weights."""
    pairs = [(variable, name) for variable, parts in found.items() for name in parts.names]
    if cluster is None:
        wrong = [said for variable, name in pairs for said in _beyond(variable, name, arrays[name])]
    else:
        mine = pairs[cluster.index :: cluster.processes]
        own = [said for variable, name in mine for said in _beyond(variable, name, arrays[name])]
        wrong = [said for each in cluster.gather("a look at the weights", own, patient=True) for said in each]
    if wrong:
        raise UserError(f"load: {'; '.join(wrong)}; no variable was loaded")


def _beyond(variable: Variable, name: str, array: _Array) -> Iterator[str]:
    """The first number of an array that a variable cannot hold."""
    try:
        numbers = array.read()
        parts = np.nditer(numbers, _PIECEWISE, buffersize=PIECE)  # never all of it in another dtype
        bad = (part[~holds(part, variable.dtype)] for part in parts)
        first = next((each[0] for each in bad if each.size), None)
    except (OSError, ValueError, MemoryError) as error:
        yield f"{name!r} cannot be read: {' '.join(str(error).split())[:300]}"
    else:
        if first is not None:
            yield (
                f"{name!r} contains {first}, but {variable.name!r} needs finite numbers that "
                f"{variable.dtype} can represent"
            )


def _made(variable: Variable, parts: _Parts, arrays: Mapping[str, _Array]) -> Any:
    given = (arrays[name].read() for name in parts.names)
    each = [
        np.reshape(np.transpose(x, parts.transpose), parts.shape) if parts.transpose else x for x in given
    ]
    return each[0] if parts.shape == variable.shape.sizes else np.stack(each).reshape(variable.shape.sizes)
