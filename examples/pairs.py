"""Pairs of texts from Python's standard library: docstrings and the functions that they describe."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

LIMIT = 3000
"""Pairs kept of each split."""


@cache
def functions(split: str) -> list[tuple[bytes, bytes]]:
    """(docstring, source from `def` on without the docstring) of functions; every tenth file is held out.

    Args:
      split: "train" or "held-out".
    """
    if split not in ("train", "held-out"):
        raise ValueError(f"split {split!r}: use 'train' or 'held-out'")
    root = Path(os.__file__).parent
    files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts))
    chosen = [p for i, p in enumerate(files) if (i % 10 == 9) == (split == "held-out")]
    found: list[tuple[bytes, bytes]] = []
    for path in chosen:
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue  # some files show how errors look
        found += _pairs(tree, text.splitlines())
        if len(found) >= LIMIT:
            break
    return found[:LIMIT]


def _pairs(tree: ast.Module, lines: list[str]) -> Iterator[tuple[bytes, bytes]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        if docstring:
            head = lines[node.lineno - 1 : node.body[0].lineno - 1]
            rest = lines[node.body[1].lineno - 1 : node.end_lineno]
            indent = len(lines[node.lineno - 1]) - len(lines[node.lineno - 1].lstrip())
            code = "\n".join(line[indent:] for line in [*head, *rest])
            yield docstring.encode(), code.encode()


def batches(
    batch: int, length: int, vocab: int, split: str = "train", seed: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """source and target [batch length]: bytes folded into 1 .. vocab-1, cut off or filled up with 0."""
    pairs = functions(split)
    rng = np.random.default_rng([seed, len(pairs)])
    while True:
        picked = [pairs[i] for i in rng.integers(0, len(pairs), batch)]
        source, target = (
            np.stack([_padded(pair[side], length, vocab) for pair in picked]) for side in (0, 1)
        )
        yield {"source": source, "targets": target}


def _padded(text: bytes, length: int, vocab: int) -> np.ndarray:
    ids = np.frombuffer(text[:length], np.uint8).astype(np.int32) % (vocab - 1) + 1
    return np.pad(ids, (0, length - len(ids)))
