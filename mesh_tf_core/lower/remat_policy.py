"""The saveable values of recomputed loops (remat policies), and their texts, which `Options` parses.

    layers                          nothing but its state: all that backward reads is computed anew
    layers:keep=attention+products  these values too; what is not kept is computed anew from what is

    layers:count=8                  the first eight of the layers, or of each stage's; the others save all

A kept value is stacked as in a loop without recomputation. What may be kept:
    products   results of products with weights, convolutions among them
    outputs    of these alone what has the dimensions of the loop's state, and is mostly added to it: where a
               weight's rows are split, devices add it up, and need not again
    attention  results of attention with the statistics of its rows, and of other products of two activations;
               what is between two of these (the softmax of plain attention)
    others     of everything else (norms, activation functions, results of loops), what backward reads
or by name: a scope (`attention`), of which what is read outside of it is kept, an operation of one
(`attention/einsum`), a weight (`wi`, `feed_forward/wi`), whose products are.
Of a kind also a part: `products-experts` what no scope or weight `experts` makes; in program order,
`products/2` the first of every two, `products/2-experts` the first of every two of `products-experts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import TICK, Block, Node, backwards, loop_name, per_graph, reads
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.lower.nodes import weights
from mesh_tf_core.ops.float8 import Quantize
from mesh_tf_core.tracing.graph import Graph

PRODUCTS, OUTPUTS, ATTENTION, OTHERS = "products", "outputs", "attention", "others"
KINDS = (PRODUCTS, OUTPUTS, ATTENTION, OTHERS)
Sets = tuple[tuple[str, ...], ...]
SETS: Sets = (
    (OUTPUTS,),
    (ATTENTION,),
    (OUTPUTS, ATTENTION),
    (PRODUCTS,),
    (PRODUCTS, ATTENTION),
    (PRODUCTS, OTHERS),
)
"""The keep sets that a search decides between by default. Others are fast to recompute and large: kept
last."""


class KeptKind(NamedTuple):
    """A word that means a kind of values: every `step`-th one of those that `without` does not name."""

    name: str
    step: int = 1
    without: tuple[str, ...] = ()

    @classmethod
    @lru_cache(maxsize=1 << 12)
    def of(cls, word: str) -> KeptKind | None:
        """The kind that a word means; None for a name."""
        found = _KIND.fullmatch(word)
        return found and cls(found[1], int(found[2] or 1), tuple(filter(None, re.split(DASH, found[3]))))


DASH = r"-(?!\d)"
"""Begins a name that a kind leaves out; in blocks/0-3, the scope of layers of a JAX model, it does not."""
_KIND = re.compile(rf"({'|'.join(KINDS)})(?:/([1-9]\d{{0,8}}))?((?:{DASH}(?:[^-]|-(?=\d))+)*)")


class Recomputed(NamedTuple):
    """Recomputed loops and the values that they keep: words of `KINDS` in this order, then names; how many
    iterations, the first ones, run again: 0 for all."""

    dim: str
    keep: tuple[str, ...] = ()
    only: int = 0

    def __str__(self) -> str:
        keep = f":keep={'+'.join(self.keep)}" if self.keep else ""
        return f"{self.dim}{keep}{f':count={self.only}' if self.only else ''}"

    @property
    def whole(self) -> Recomputed:
        """The same of all iterations."""
        return self._replace(only=0)

    @classmethod
    @lru_cache(maxsize=1 << 12)
    def parse(cls, text: str) -> Recomputed:
        """Parses a text; UserError if it is not a policy."""
        dim, *rest = map(str.strip, text.split(":"))
        said = {word.strip(): value.strip() for word, _, value in (each.partition("=") for each in rest)}
        words, count = {w.strip() for w in said.get("keep", "-").split("+")}, said.get("count", "1")
        if not (said.keys() <= {"keep", "count"} and len(said) == len(rest) and all(words)) or not (
            count.isdecimal() and int(count)
        ):
            raise UserError(
                f"recompute {text!r}: write the dimension of a loop, or DIM:keep=KIND+KIND, where KIND "
                f"is {', '.join(KINDS)} or the name of a scope; DIM:count=N for N of its iterations"
            )
        return cls.of(dim, words if "keep" in said else set(), int(count) if "count" in said else 0)

    @classmethod
    def of(cls, dim: str, keep: Set[str], count: int = 0) -> Recomputed:
        """The policy that keeps some words: each that another one implies is left out."""
        return cls(dim, tuple(sorted((w for w in keep if not _implied(w, keep)), key=_order)), count)


def _implied(word: str, keep: Set[str]) -> bool:
    kind = KeptKind.of(word)
    return kind is not None and (
        (kind.name != word and kind.name in keep) or (kind.name == OUTPUTS and PRODUCTS in keep)
    )


def _order(word: str) -> tuple[int, str]:
    kind = KeptKind.of(word)
    return KINDS.index(kind.name) if kind else len(KINDS), word


Policies = frozenset[Recomputed]
"""All recomputed loops, and the values that they keep."""


def policies(said: Iterable[str | Recomputed]) -> Policies:
    """The policies, parsed from texts or given as values."""
    return frozenset(Recomputed.parse(each) if isinstance(each, str) else each for each in said)


def of_stages(recompute: Policies, stages: Iterable[str]) -> Policies:
    """The policies of stages, dimensions of layers: they change the graph of the step, whereas the others are
    for lowering. Whole stages that are recomputed from their input keep all values that their layers would
    keep."""
    about = {each.dim: each for each in recompute} if stages else {}
    named = [TICK] if TICK in about else sorted({*stages} & about.keys())
    return frozenset(about[name] for name in named)


def kind_of(tensor: int, block: Block, graph: Graph) -> str:
    """The kind of a tensor of a loop's body; renamed, laid out otherwise or converted, it is the same."""
    node = graph.producer.get(tensor)
    while node is not None and node.inputs and (node.op.free or node.op.converts):
        node = graph.producer.get(node.inputs[0])
    if node is not None and _is_product(node):
        return ATTENTION if _of_activations(node, block, graph) else PRODUCTS
    return ATTENTION if tensor in _between(graph, block.id) else OTHERS


def _is_product(node: Node) -> bool:
    return node.body is None and node.op.kind in ("matmul", "attention")


def _of_activations(node: Node, block: Block, graph: Graph) -> bool:
    """Whether a product has no weight among its operands, in eight bits or as it is."""
    factors = (graph.tensor(i) for i in _factors(node, graph))
    return node.op.kind == "attention" or not any(graph.is_free(each, block) for each in factors)


def _factors(node: Node, graph: Graph) -> Iterator[int]:
    """What a product multiplies, before it was rounded to eight bits."""
    for i in node.inputs:
        maker = graph.producer.get(i)
        if maker is not None and isinstance(maker.op, Quantize):
            while maker is not None and maker.inputs and (maker.op.free or isinstance(maker.op, Quantize)):
                i = maker.inputs[0]
                maker = graph.producer.get(i)
        yield i


@per_graph
def _between(graph: Graph, number: int) -> frozenset[int]:
    """The values of the body of this number that come of a product of two activations, and go to another one,
    with no other products in between."""
    block, after, before = graph.blocks[number], set[int](), set[int]()
    for node in block.nodes:
        if not _is_product(node):
            after.update(node.outputs if not after.isdisjoint(reads(node)) else ())
        elif _of_activations(node, block, graph):
            after.update(node.outputs)
    for node in reversed(block.nodes):
        if not _is_product(node):
            before.update(reads(node) if not before.isdisjoint(node.outputs) else ())
        elif _of_activations(node, block, graph):
            before.update(reads(node))
    return frozenset(after & before)


def kept_values(words: Iterable[str], block: Block, graph: Graph) -> set[int]:
    """The tensors of a loop's body that some words mean."""
    found: set[int] = set()
    for word in words:
        kind = KeptKind.of(word)
        found |= _leaving(word, block, graph) if kind is None else _of_kind(kind, block, graph)
    found = {t for t in found if not graph.is_free(graph.tensor(t), block)}
    makers = (graph.producer.get(t) for t in found)
    found |= {m.inputs[1] for m in makers if m is not None and isinstance(m.op, Quantize)}  # its scales
    return {_reduced(t, block, graph) for t in found} if found else found


def handed_on(keep: Iterable[str], block: Block, graph: Graph) -> set[int]:
    """The tensors that modules which words leave out (`products-experts`) give to others in a loop's body."""
    kinds = filter(None, map(KeptKind.of, keep))
    return {t for kind in kinds for name in kind.without for t in _leaving(name, block, graph)}


def _of_kind(kind: KeptKind, block: Block, graph: Graph) -> set[int]:
    """The values of a kind: those of an operation count as one."""
    if kind.name == OTHERS:
        made: Iterable[tuple[int, ...]] = ((t,) for t in sorted(_saved(block)))
    else:
        made = (n.outputs for n in block.nodes if n.op.kind in ("matmul", "attention"))
    name = PRODUCTS if kind.name == OUTPUTS else kind.name
    groups = [[t for t in group if kind_of(t, block, graph) == name] for group in made]
    if kind.name == OUTPUTS:
        like = partial(_like_state, block=block, graph=graph)
        groups = [[t for t in group if like(t) or like(_reduced(t, block, graph))] for group in groups]
    there = [group for group in groups if group and not _named(group[0], kind.without, graph)]
    return {t for group in there[:: kind.step] for t in group}


def _saved(block: Block) -> set[int]:
    """The tensors of a body that backward reads, but for stacks that loops inside save for it: these save in
    the second run, since in the first one no backward follows."""
    inside = (node.body.saved.values() for node in block.nodes if node.body is not None)
    return block.saved.keys() - {*chain(*inside)}


def _named(tensor: int, names: Iterable[str], graph: Graph) -> bool:
    maker = graph.producer.get(tensor)
    return maker is not None and not {*names}.isdisjoint(_names(maker, graph))


def _like_state(tensor: int, block: Block, graph: Graph) -> bool:
    dims = set(graph.tensor(tensor).shape.names)
    return any(dims == set(graph.tensor(c).shape.names) for c in block.carry_in)


def _reduced(tensor: int, block: Block, graph: Graph) -> int:
    """What takes fewer bytes than a tensor and stands for it, as nobody else reads it: what it is converted
    to, or what it is called between operations, where the state may be split otherwise."""
    passed = tensor
    while passed not in block.saved and passed not in block.carry_out:
        readers = [node for node in block.nodes if passed in reads(node)]
        if len(readers) != 1 or not (readers[0].op.free or readers[0].op.converts):
            break
        other, *more = readers[0].outputs
        if more:  # several values with one gradient of their own
            break
        smaller = itemsize(graph.tensor(other).dtype) < itemsize(graph.tensor(tensor).dtype)
        if smaller or (_like_state(other, block, graph) and not _like_state(tensor, block, graph)):
            tensor = other
        passed = other
    return tensor


def _leaving(name: str, block: Block, graph: Graph) -> set[int]:
    """What a scope, or an operation, gives to others in its body; of an operation also what backward alone
    reads (a factor of eight bits)."""
    inside = [node for node in block.nodes if name in _names(node, graph)]
    numbers = {node.index for node in inside}
    read = {o for n in inside if "/" in name and f"/{n.path}".endswith(f"/{name}") for o in n.outputs}
    read &= block.saved.keys()
    for node in block.nodes if inside else ():
        if node.index not in numbers:
            read |= reads(node)
    return {o for node in inside for o in node.outputs} & read


def _names(node: Node, graph: Graph) -> Iterator[str]:
    """What a node may be called: by the parts of its path, and of that of its weights."""
    paths = [node.path]
    if node.op.kind == "matmul":
        paths += [weights(graph)[i] for i in _factors(node, graph) if i in weights(graph)]
    for path in paths:
        parts = path.split("/")
        for i in range(len(parts)):
            yield from ("/".join(parts[i:j]) for j in range(i + 1, len(parts) + 1))


def check_kept(recompute: Policies, loops: Set[str], blocks: Iterable[Block], graph: Graph) -> None:
    """UserError for a dimension that no loop runs over, one that is named twice, or words that mean nothing
    there.

    Args:
      loops: dimensions of all loops.
      blocks: the bodies with a backward.
    """
    known: dict[str, Recomputed] = {}
    blocks = list(blocks)
    for asked in sorted(recompute):
        text = str(asked)
        if asked.dim not in loops:
            example = f"{min(loops, default='')}:keep=products+attention"
            keeps = f" (to keep some values instead of recomputing them, write e.g. {example})" * bool(loops)
            raise UserError(
                f"recompute {text!r}: the model has no loop over {asked.dim!r}; "
                f"{known_names(asked.dim, {*loops, 'always', 'never'})}{keeps}"
            )
        if known.setdefault(asked.dim, asked) != asked:
            raise UserError(
                f"recompute: {known[asked.dim]} and {asked} apply to the same loops; give only one entry "
                f"for {asked.dim}"
            )
        here = [b for b in blocks if loop_name(b, graph) == asked.dim]
        _check_count(text, asked, here, graph)
        for word in asked.keep:
            _check_without(text, word, here, graph)
            if not any(kept_values((word,), block, graph) for block in here):
                there = dict.fromkeys(word for block in here for word in words_of(block, graph))
                raise UserError(
                    f"recompute {text!r}: loops over {asked.dim!r} have no values of kind or scope "
                    f"{word!r}; {known_names(word, there)}"
                )


def _check_count(text: str, asked: Recomputed, blocks: Iterable[Block], graph: Graph) -> None:
    """UserError for a number of iterations that some loop does not have, or whose loop has no parts."""
    for block in blocks if asked.only else ():
        size = block.dim.size
        if asked.only >= size:
            raise UserError(
                f"recompute {text!r}: a loop over {asked.dim!r} has {size} iterations here; write a smaller "
                f"count, or {asked.whole} to recompute all"
            )
        apart = all(back.parent != block.parent for back in backwards(graph).get(block.id, ()))
        if apart or any(node.body is not None and node.body.saved for node in block.nodes):
            why = "its backward is in another loop" if apart else "it has loops inside"
            raise UserError(
                f"recompute {text!r}: {why}, so all its iterations are alike; write {asked.whole}"
            )


def means_something(word: str, blocks: Sequence[Block], graph: Graph) -> bool:
    """True if loops have values of a word, and those that it leaves out."""
    kind = KeptKind.of(word)
    known = kind is None or {*kind.without} <= _every_name(blocks, graph)
    return known and any(kept_values((word,), block, graph) for block in blocks)


def _every_name(blocks: Iterable[Block], graph: Graph) -> set[str]:
    return {name for block in blocks for node in block.nodes for name in _names(node, graph)}


def _check_without(text: str, word: str, blocks: Iterable[Block], graph: Graph) -> None:
    kind, names = KeptKind.of(word), _every_name(blocks, graph)
    for name in kind.without if kind is not None else ():
        if name not in names:
            raise UserError(
                f"recompute {text!r}: the loop has no scope or weight {name!r} to leave out of {word!r}; "
                f"{known_names(name, sorted(n for n in names if '/' not in n))}"
            )


def words_of(block: Block, graph: Graph) -> Iterator[str]:
    """The words that may name saveable values of a body; of scoped names the single words."""
    yield from (word for word in KINDS if kept_values((word,), block, graph))
    for node in block.nodes:
        names = (n for n in _names(node, graph) if "/" not in n and n != node.name and not n.isdigit())
        yield from filter(None, names)
