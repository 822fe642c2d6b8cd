"""A recommendation model (Naumov et al. 2019, "DLRM") that predicts whether a user clicks.

    layoutopt search examples/dlrm.py:criteo --devices 8 --hardware h100
    layoutopt train examples/dlrm.py --layout "batch:data;tables:data" --mesh "data:4" --steps 200

Nearly all parameters are embeddings. The paper splits `tables` over the axis that splits `batch`: each device
stores whole tables, looks up the ids of the whole batch in them, and an all-to-all sends the vectors to the
devices of their examples. Common alternatives are to split `rows` or `features`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn


@trained(learning_rate=0.01)
def model(
    batch: int = 64,
    numbers: int = 13,
    tables: int = 8,
    rows: int = 128,
    features: int = 16,
    bottom: int = 64,
    top: int = 64,
    layers: int = 2,
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model.

    Args:
      numbers: numeric features of an example.
      tables, rows: categorical features, and elements of the table of each (ids are hashed to so many).
      features: of an embedding.
      bottom, top, layers: hidden units of the perceptrons below and above the interactions, and their layers.
    """
    g, b = training.graph("dlrm"), mtf.Dim("batch", batch)
    n, t, r, f = (
        mtf.Dim("numbers", numbers),
        mtf.Dim("tables", tables),
        mtf.Dim("rows", rows),
        mtf.Dim("features", features),
    )
    dense = g.input("numbers", [b, n], "float32")
    ids, clicked = g.input("ids", [b, mtf.Dim("categories", tables)]), g.input("clicked", [b], "float32")

    def perceptron(x: mtf.Tensor, reduced: str, width: int, name: str) -> mtf.Tensor:
        for i in range(layers):
            hidden = mtf.Dim(f"{name}_{i}", width)
            x = nn.Dense((hidden,), (reduced,), bias=True, activation="relu", name=hidden.name)(x)
            reduced = hidden.name
        return x

    x = perceptron(mtf.log1p(dense).cast(training.dtype), "numbers", bottom, "bottom")
    x = nn.Dense((f,), (x.shape.names[-1],), bias=True, name="bottom_out")(x)
    table = g.variable("embedding/tables", [t, r, f], mtf.Uniform(-(rows**-0.5), rows**-0.5))
    # Where the tables lie, the batch has another name: a layout may split tables instead of it.
    there = mtf.take_along(table, mtf.rename(ids, batch="looked_up", categories="tables"), r)
    found = mtf.rename(there, looked_up="batch", tables="fields").cast(training.dtype)

    # Products of the pairs of an example's vectors, each pair once.
    one = mtf.reshape(x, [b, mtf.Dim("fields", 1), f])
    vectors = mtf.concat([one, found], "fields")
    fields, others = vectors.dim("fields"), mtf.Dim("other_fields", tables + 1)
    products = mtf.einsum([vectors, mtf.rename(vectors, fields=others.name)], [fields, others, b])
    first, second = np.tril_indices(tables + 1, -1)
    chosen = mtf.constant(g, first * (tables + 1) + second, [mtf.Dim("pairs", len(first))])
    pairs = mtf.gather(mtf.reshape(products, [mtf.Dim("products", (tables + 1) ** 2), b]), chosen, "products")
    hidden = mtf.Dim("top_in", top)
    y = nn.Dense((hidden,), ("features",), bias=True, name="top_from_numbers")(x)
    y = y + nn.Dense((hidden,), ("pairs",), name="top_from_pairs")(pairs)
    y = perceptron(mtf.relu(y), "top_in", top, "top")
    logits = mtf.squeeze(
        nn.Dense((mtf.Dim("click", 1),), (y.shape.names[-1],), bias=True, name="output")(y), "click"
    )
    loss = mtf.reduce_mean(nn.sigmoid_cross_entropy(logits, clicked))
    right = mtf.reduce_mean((logits > 0.0).cast("float32").equal(clicked).cast("float32"))
    return training.model(loss, "dlrm", metrics={"accuracy": right})


criteo = partial(
    model, batch=65536, tables=26, rows=1 << 20, features=128, bottom=512, top=1024, layers=3, optimizer="sgd"
)
"""Criteo's 13 numbers and 26 categories, hashed to a million each: 3,493,900,417 parameters."""


def data(
    batch: int = 64, numbers: int = 13, tables: int = 8, rows: int = 128, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields synthetic examples: ids follow Zipf's law, clicks follow hidden scores of ids and numbers."""
    if split not in ("train", "held-out"):
        raise ValueError(f"split {split!r}: use 'train' or 'held-out'")
    hidden = np.random.default_rng(0)
    scores = hidden.normal(size=(tables, rows)).astype(np.float32)
    slopes = hidden.normal(size=numbers).astype(np.float32)
    rng = np.random.default_rng([1, split == "train"])
    while True:
        ids = ((rng.zipf(1.3, (batch, tables)) - 1) % rows).astype(np.int32)
        dense = rng.exponential(size=(batch, numbers)).astype(np.float32)
        score = scores[np.arange(tables), ids].sum(1) / tables**0.5 + (np.log1p(dense) - 0.6) @ slopes
        clicked = (score + rng.logistic(size=batch) / 4 > 0).astype(np.float32)
        yield {"numbers": dense, "ids": ids, "clicked": clicked}
