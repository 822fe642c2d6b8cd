"""`from_torch`: a PyTorch module as a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from layoutopt.frameworks import says
from layoutopt.front_ends import TORCH
from layoutopt.importers.arrays.build import built, optimizer_of
from layoutopt.importers.arrays.contract import KEY, Leaf, TracedProgram, Var
from layoutopt.importers.arrays.model import ImportedModel, not_first, uncollected, why_not_added
from layoutopt.importers.torch.calls import array_of, dtype_of, torch_module, undistributed
from layoutopt.importers.torch.capture import MODULE, Captured, NotTracedError, ValuesNeededError, captured
from layoutopt.importers.torch.checks import DERIVED
from layoutopt.importers.torch.reader import ReadProgram, read
from layoutopt.importers.torch.styles import StyleFlow
from layoutopt.importers.torch.torch_plan import TorchPlan
from layoutopt.importers.torch.trials import ModuleTrials
from layoutopt.plan.build import Plan, check_plan_model, decided
from layoutopt.plan.units import some
from layoutopt.space.decisions import beyond
from layoutopt.space.restriction import DimRoles, Role
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower import Options
from mesh_tf_core.model import TrainingStep
from mesh_tf_core.optimizers import SGD, Adam, Optimizer
from mesh_tf_core.tracing.copying import batch_names

OPTIMIZERS = {
    "adamw": Adam(1e-3, weight_decay=1e-2, moments="own"),
    "adam": Adam(1e-3, moments="own"),
    "sgd": SGD(1e-3),
}
"""Those of torch.optim, with its defaults."""
SENT = (
    "torch.autocast leaves parameters in float32, and FSDP exchanges them so, but predicted messages are in "
    "autocast's type; from_torch(param_dtype=torch.bfloat16) plans FSDP's MixedPrecisionPolicy, which does so"
)
KEPT = 1 << 30
"""Bytes of parameters up to which their values are the model's initial ones."""


@dataclass
class TorchModel(ImportedModel):
    """A model that a PyTorch module is; `origin.function` is the module.

    Attributes:
      combines: the operation that combines examples of the batch, for which the losses of parts of a batch do
        not add up to its own.
      changes: the buffers whose new values are made of examples of the batch, but for BatchNorm's.
      param_dtype: in which operations read parameters; "": in their own element type.
      carried: the module with placements of its own, and None; None of a module without.
    """

    front_end: ClassVar[str] = "torch"
    styles: StyleFlow | None = field(default=None, repr=False, compare=False)
    combines: str = field(default="", repr=False, compare=False)
    changes: str = field(default="", repr=False, compare=False)
    param_dtype: str = ""
    carried: Any = field(default=None, repr=False, compare=False)

    @property
    def limits(self) -> Mapping[str, tuple[tuple[Any, ...], str]]:
        """Fields of the search space -> their values, where the module allows fewer, and why."""
        return {} if self.styles is None else self.styles.limits

    def notes(self, options: Options) -> tuple[str, ...]:
        """Those of every imported model, on examples that only those of one rank are combined with, and on
        code that keeps a dimension whole."""
        why = (
            f"{self.combines} combines examples of the batch; each data rank of PyTorch combines its own "
            "alone, so with several data ranks the loss is not that of the whole batch on one device"
        )
        state = (
            f"the forward changes {self.changes} by examples of the batch; each data rank of PyTorch does so "
            "by its own alone, so the ranks' buffers differ from one another and from those of one device: "
            "sum these values over ranks in the module"
        )
        whole, lost = {} if self.styles is None else self.styles.code, self.graph.unsplit
        found = [why] * bool(self.combines) + [state] * bool(self.changes)
        found += [f"{n} stays whole: {w}" for n, w in whole.items()]
        about = DimRoles.of(self)
        held = [max(own, key=lambda n: (n in whole, n)) for own in about.weights if own <= lost.keys()]
        if held and (others := [n for n in about.named[Role.INNER] if n not in lost]):
            because = "" if (first := max(held)) in whole else f": {lost[first]}"
            said = f"PyTorch splits all weights of a layer or none, and {first} stays whole{because}"
            found.append(f"{', '.join(others)} cannot be split: {said}")
        return (*super().notes(options), *found)

    def _whole_step(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> TrainingStep:
        try:
            return super()._whole_step(loss, metrics)
        except UserError as error:
            own = [note for note in self.origin.notes if DERIVED in note] if self.origin else []
            raise UserError("; ".join((str(error), *own))) from None

    def _why_whole(self, layers: str) -> str:
        # Numbers that a mean is over are no reason: `plan.torch` weights parts by them.
        if self.combines:
            return f"{self.combines} combines examples of the batch; a microbatch would combine its own alone"
        if self.changes:
            return f"the forward would change {self.changes} by the examples of each microbatch"
        return not_first(self.origin, self.batch_dim) if self.origin and self.batch_dim else ""

    def applied(self, plan: Plan) -> TorchPlan:
        """The plan in the user's own module: `plan.torch`."""
        check_plan_model(plan, self)
        return self.under(plan.mesh, plan.layout, plan.options, plan.data.framework or "")

    def under(self, mesh: Mesh, layout: Layout, options: Options, framework: str = "") -> TorchPlan:
        """The module under a layout.

        Args:
          framework: as `--framework` has it; its variant `gradients` is the type of sums.

        Raises:
          UserError: the plan has a decision that `plan.torch` does not apply.
        """
        assert self.styles is not None
        said = decided(options, layout, self.stages(mesh, layout))
        if lost := beyond(says("torch").of(self), said):
            raise UserError(
                f"plan.torch does not apply this plan, in which {lost.words}; search with framework='torch'"
            )
        once = "float32" if "gradients=buffer" in framework else self.param_dtype
        summed = self.param_dtype if "gradients=bfloat16" in framework else "float32"
        return TorchPlan(self, self.styles, mesh, layout, options, (self.param_dtype, once, summed))


def _untrained(module: Any) -> str:
    """Why nothing of a module is trained, and what to do."""
    own = [*module.parameters()]
    if not own:
        return "the module has no parameters; give the module to train"
    if not any(p.requires_grad for p in own):
        return "all parameters have requires_grad=False; leave it true for those to train"
    return (
        "the loss depends on no parameter to train; compute it from the module's outputs as a tensor, "
        "without detach(), no_grad(), argmax() or item() between"
    )


@uncollected()
def from_torch(
    module: Any,
    example_batch: Any,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: str | Optimizer = "adamw",
    names: Mapping[str, Any] | None = None,
    name: str = "",
    param_dtype: Any = None,
) -> TorchModel:
    """Builds a model from a PyTorch module. The module is traced once and not changed.

    Args:
      module: a torch.nn.Module. Tensors on the device "meta" are enough, and DTensors are read as whole;
        `layoutopt.lint` reads their placements. Parameters with
        `requires_grad=False` are stored and not trained. Call `from_torch` inside torch.autocast if the
        training loop does, on a machine without a GPU inside that of "cpu".
      example_batch: what the module is called with: a mapping of keyword arguments, a tuple of arguments, or
        one tensor. The path of a tensor is the name of the model's input.
      loss: loss(outputs, batch) -> a scalar tensor; None if the module returns its loss, as a scalar, as
        `.loss` or in a tuple.
      optimizer: adamw, adam or sgd (with the defaults of torch.optim, whose state has the parameters' element
        type), adafactor, or an `mtf.Optimizer`.
      names: {"path/of/a/parameter": ("d_ff", "d_model")} names dimensions, and {"d_ff_2": "bottleneck"}
        renames a dimension.
      name: of the model; by default the module's class.
      param_dtype: torch.bfloat16 or float16, in which FSDP's `MixedPrecisionPolicy(param_dtype=...)` gathers
        parameters, and in which the module gets the fractions of the batch; None: in their own.

    Raises:
      UserError: torch.export cannot trace the module, or some of its operations are not supported (the
        message names all of them with their lines).

    Example:
      >>> import layoutopt, torch
      >>> class Regression(torch.nn.Module):
      ...     def __init__(self):
      ...         super().__init__()
      ...         self.linear = torch.nn.Linear(4, 2, bias=False)
      ...
      ...     def forward(self, x, y):
      ...         return torch.nn.functional.mse_loss(self.linear(x), y)
      >>> batch = {"x": torch.empty(8, 4, device="meta"), "y": torch.empty(8, 2, device="meta")}
      >>> layoutopt.from_torch(Regression().to("meta"), batch).parameters
      8
    """
    torch = torch_module()
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"from_torch: {module!r} is not a torch.nn.Module; give the module to train")
    if param_dtype not in (None, *(known := (torch.bfloat16, torch.float16, torch.float32))):
        raise UserError(
            f"from_torch: param_dtype is {param_dtype!r}; give None or {', '.join(map(str, known))}"
        )
    placed, module = module, undistributed(module)
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )
    trained = {id(p): p.requires_grad for p in module.parameters()}
    size = sum(t.nbytes for t in {id(t): t for t in own.values()}.values())
    first: dict[int, str] = {}
    ties = {f"{MODULE}.{x}": f"{MODULE}.{first.setdefault(id(t), x)}" for x, t in own.items()}
    buffers = {f"{MODULE}.{n}": array_of(t) for n, t in module.named_buffers()}
    values = {n: a for n, a in buffers.items() if a is not None}

    def traced(follow: bool) -> tuple[Captured, ReadProgram]:
        found = captured(module, example_batch, loss, param_dtype, follow)
        return found, read(found.program, values, ties, found.autocast)

    try:
        try:
            found, program = traced(False)
        except ValuesNeededError:
            found, program = traced(True)
    except NotTracedError as error:
        why = ModuleTrials(module, example_batch).run()
        if why and "meta" not in why.lower():  # what it says of its own trial is no news
            raise UserError(
                f"from_torch: the module does not run on this batch: {why}; give tensors of the shapes and "
                "element types that a training step has"
            ) from error
        raise
    pairs: dict[str, list[tuple[Var, Leaf]]] = {"params": [], "state": [], "batch": []}
    paths = iter(found.batch)
    for kind, target, v in program.arguments:
        if kind == "USER_INPUT":
            v.path = next(paths)
            pairs["batch"].append((v, Leaf(v.path, v.shape, v.dtype)))
            continue
        path = target.removeprefix(f"{MODULE}.")
        tensor = own.get(path)
        v.path = path.replace(".", "/")
        role = "params" if kind == "PARAMETER" else "state"
        value = array_of(tensor) if size <= KEPT else None
        stored = v.dtype if param_dtype is None or role != "params" else dtype_of(own[path].dtype)
        leaf = Leaf(v.path, v.shape, stored, value, None, trained.get(id(tensor), False))
        pairs[role].append((v, leaf))
    keys = [(program.key, Leaf("rng", (), KEY))] if program.key is not None else []
    title = name or type(module).__name__
    made = built(
        TracedProgram(
            title if title.isidentifier() else "model",
            TORCH,
            program.block,
            pairs["params"],
            pairs["state"],
            pairs["batch"],
            keys,
            0,
            program.new_state,
            {},
            ("loss", *("" for _ in program.block.outs[1:])),
            (*found.notes, *program.notes, *([SENT] if program.autocast and param_dtype is None else [])),
            module,
            (example_batch,),
            ("batch",),
        ),
        names or {},
    )
    model = TorchModel(
        made.loss,
        optimizer_of(OPTIMIZERS.get(str(optimizer), optimizer), TORCH.call),
        made.metrics,
        title,
        token_dims=made.token_dims,
        framework="torch",
        origin=made.origin,
        param_dtype="" if param_dtype is None else dtype_of(param_dtype),
        carried=None if placed is module else (placed, None),
    )
    if not model.parameters:
        raise UserError(f"from_torch: {_untrained(module)}")
    again = made.origin.rerolled
    axes = ((n, x) for a in made.origin.batch.values() for n, x in zip(a.axes, a.shape, strict=True))
    rows = next((size for names, size in axes if model.batch_dim in names), 1)
    counted = (id(again.twins.get(id(x), x)) for x in program.whole)
    whole = frozenset(made.origin.tensors[i] for i in counted if i in made.origin.tensors)
    if model.batch_dim:
        model.combines, own_state, model.divided = why_not_added(made.loss, model.batch_dim, whole)
        model.changes = some([name.removeprefix("state/").replace("/", ".") for name in own_state], 3, 80)
    model.styles = StyleFlow(model.graph, module, made.origin, rows, program.norms)
    model.recomputes, own_axes = bool(program.norms), model.styles.parameters
    trials = ModuleTrials(module, example_batch, own_axes, found.calls, param_dtype, found.heads)
    model.styles.try_out(trials)
    model.graph.unsplit.update(model.styles.without)
    if model.batch_dim and (others := batch_names(model.graph, model.batch_dim) - {model.batch_dim}):
        beside = {n for t in model.graph.tensors if model.batch_dim in t.shape.names for n in t.shape.names}
        model.graph.unsplit.update(dict.fromkeys(others & beside, "a data rank compares its own rows alone"))
    return model
