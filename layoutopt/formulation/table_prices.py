"""The cost of single layouts from the costs of clusters, each lowered on first use."""

import math

from layoutopt.formulation.extract import Draft, latency, own_seconds, shared_seconds
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.combine import BucketKey


class TablePrices:
    """Costs of layouts of one problem, as its tables would have them, without making the tables."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def seconds(self, layout: Layout, options: Options) -> float:
        """Seconds of a step; inf if that is not legal."""
        draft, prices, chosen = self.draft, self.draft.pricer, self.draft.decided.write(layout, options)
        sizes, stages = draft.context.graph.dims(), draft.decided.stages
        split = ((n, draft.mesh.group_size(axes)) for n, axes in layout.rules if n not in stages)
        if any(size % ways for name, ways in split for size in sizes.get(name, ())):
            return math.inf
        total, alpha = draft.fixed_seconds, dict[BucketKey, float]()
        for cluster in draft.left:
            entry = draft.tabler_of(cluster).entry(cluster, draft.decided, chosen)
            if entry is None:
                return math.inf
            alpha.update({k: latency(k, prices) for k in entry.small if k not in alpha})
            total += cluster.multiplicity * own_seconds(entry, alpha, prices)
        return total + shared_seconds(alpha.keys(), prices)
