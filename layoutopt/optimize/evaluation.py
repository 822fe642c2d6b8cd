"""What a search asks about layouts of one model on one piece of hardware, and what the answers share."""

from __future__ import annotations

from collections.abc import Hashable

from costmodels.hardware import Hardware
from costmodels.pricing.pricer import Pricer, pricer
from layoutopt.evaluator import DEFAULT, Evaluation, evaluate
from layoutopt.formulation.extract import Draft
from layoutopt.formulation.shared import SharedContext
from layoutopt.optimize.memoised import TablePrices
from layoutopt.space.decisions import Decisions
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model


class Evaluator:
    """Evaluations of one model on one piece of hardware, and what they share: nothing is made twice."""

    def __init__(self, model: Model, hardware: Hardware) -> None:
        self.model, self.hardware = model, hardware
        self._known: dict[Hashable, Evaluation | str] = {}
        self._prices: dict[Mesh, Pricer] = {}
        self._contexts: dict[int, SharedContext] = {}
        self._table_prices: TablePrices | None = None

    def prices(self, mesh: Mesh) -> Pricer:
        if mesh not in self._prices:
            self._prices[mesh] = pricer(self.hardware, mesh)
        return self._prices[mesh]

    def context(self, microbatches: int) -> SharedContext:
        if microbatches not in self._contexts:
            self._contexts[microbatches] = SharedContext(self.model, microbatches)
        return self._contexts[microbatches]

    def table_prices(self, mesh: Mesh, decided: Decisions) -> TablePrices:
        """Of the problem that was asked for last they know what they priced."""
        found = self._table_prices
        if found is None or found.draft.mesh != mesh or found.draft.decided is not decided:
            context = self.context(decided.microbatches)
            self._table_prices = found = TablePrices(
                Draft(self.model, mesh, decided, self.prices(mesh), context)
            )
        return found

    def __call__(self, mesh: Mesh, layout: Layout, options: Options = DEFAULT) -> Evaluation:
        """As `evaluate`, but the program is not checked: `make_plan` checks that of the answer."""
        key = mesh, layout, options.key
        found = self._known.get(key)
        if found is None:
            try:
                prices = self.prices(mesh)
                found = evaluate(self.model, mesh, layout, self.hardware, options, prices, check=False)
            except LayoutError as error:
                found = str(error)
            self._known[key] = found
        if isinstance(found, str):
            raise LayoutError(found)
        return found
