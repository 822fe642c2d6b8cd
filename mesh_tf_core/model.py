"""A model: a graph with a loss, an optimizer, and the hyperparameters it was built from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.blocks import loop_dims
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import GPIPE
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower import Options, lower
from mesh_tf_core.lower.options import check_offload
from mesh_tf_core.lower.pipeline import ReplicaPrograms, check_saved, check_whole, lower_replicas
from mesh_tf_core.lower.recomputed import layers_again
from mesh_tf_core.lower.remat_policy import Policies, of_stages
from mesh_tf_core.ops.float8 import ScaledProduct
from mesh_tf_core.ops.float8_recipes import recipe_named
from mesh_tf_core.optimizers import SGD, Optimizer, by_name
from mesh_tf_core.optimizers.base import apply_updates
from mesh_tf_core.tracing.assigning import as_updates
from mesh_tf_core.tracing.gradients import gradients, unwidened
from mesh_tf_core.tracing.graph import Graph, graph_of
from mesh_tf_core.tracing.microbatch import Accumulation
from mesh_tf_core.tracing.pipelined_step import PipelinedStep
from mesh_tf_core.tracing.virtual_stages import check_stages, refused

DEFAULT = Options()
NOTHING: Policies = frozenset()
NO_STAGES: Mapping[str, int] = MappingProxyType({})


@dataclass
class Model:
    """A model with named dimensions: a loss, an optimizer and metrics, without devices.

    Attributes:
      graph: the operations. Those of the training step are added on first use.
      loss: the scalar tensor to minimise.
      metrics: name -> scalar tensor that is reported beside the loss.
      name, hparams: the model's name and hyperparameters, as plans and reports show them.
      layouts: name -> (mesh string, layout string): published or hand-written layouts that a search compares
        with its answer.
      token_dims: names of dimensions of an input whose elements are the tokens of a step; empty if the model
        has no tokens.
      assumed: hyperparameters that nobody set -> why they have their value, '' for an ordinary default.
      remarks: notes for every plan of the model, such as on what its file leaves open.
      framework: the training software that runs it where a question names none.
      given: the model as its user built it, if this is a padded one.
      network: network(graph) builds the model in another graph and returns the function that computes logits
        there (see `decoding`); None for models that do not generate text.

    Example:
      >>> import mesh_tf_core as mtf
      >>> graph, batch, d_model = mtf.Graph("mean"), mtf.Dim("batch", 8), mtf.Dim("d_model", 4)
      >>> x = graph.input("x", [batch, d_model], "float32")
      >>> w = graph.variable("w", [d_model], mtf.Normal(0.1))
      >>> model = mtf.Model(mtf.reduce_mean(mtf.square(x * w)), mtf.SGD(0.1))
      >>> model.parameters
      4
    """

    loss: Tensor
    optimizer: Optimizer = field(default_factory=lambda: SGD(0.1))
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    name: str = "model"
    hparams: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    token_dims: Sequence[Dim | str] = ()
    assumed: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    framework: str = "layoutopt"
    network: Callable[[Graph], Callable[..., Tensor]] | None = field(default=None, repr=False)
    given: Model | None = field(default=None, repr=False, compare=False)
    _whole: TrainingStep | None = field(default=None, repr=False, compare=False)
    _others: dict[Hashable, tuple[int, Any]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Tensor) or len(self.loss.shape):
            raise UserError(f"Model: loss must be a scalar tensor, found {self.loss!r}; use mtf.reduce_mean")
        _ = self.tokens

    @property
    def graph(self) -> Graph:
        return graph_of(self.loss)

    @property
    def parameters(self) -> int:
        """The number of trained parameters (elements of trainable variables)."""
        return sum(v.shape.size for v in self.graph.variables.values() if v.trainable)

    @property
    def frozen(self) -> int:
        """The number of elements of untrained arrays that stay: frozen weights, averages, statistics."""
        variables = self.graph.variables.values()
        return sum(v.shape.size for v in variables if v.own_storage and not v.trainable)

    @property
    def fingerprint(self) -> str:
        """Changes when an operation, a shape, a dtype or a variable of the training step changes."""
        graph = (self.given or self).step_graph
        return graph.remembered("fingerprint", lambda: _fingerprint(graph))

    @property
    def batch_dim(self) -> str | None:
        """The first dimension of every input, if all inputs share one: the dimension of data parallelism."""
        firsts = {t.shape.names[0] for t in self.graph.inputs.values() if t.shape.names}
        return firsts.pop() if len(firsts) == 1 else None

    @property
    def examples(self) -> int:
        """The number of examples in a step: the largest first dimension of an input."""
        return max((t.shape.sizes[0] for t in self.graph.inputs.values() if len(t.shape)), default=1)

    @property
    def batch_setting(self) -> str | None:
        """The hyperparameter that is the size of the batch; None if none is."""
        name = self.batch_dim
        sizes = self.graph.dims().get(name, set()) if name is not None else set()
        return name if len(sizes) == 1 and self.hparams.get(str(name)) in sizes else None

    @property
    def batch(self) -> dict[str, int]:
        """The sizes of what a step reads: of the batch, and of its tokens."""
        names = dict.fromkeys((*filter(None, (self.batch_dim,)), *self._token_names))
        shapes = [t.shape for t in self.graph.inputs.values()]
        return {n: s.dim(n).size for n in names for s in reversed(shapes) if n in s.names}

    @property
    def _token_names(self) -> tuple[str, ...]:
        return tuple(d.name if isinstance(d, Dim) else d for d in self.token_dims)

    @property
    def tokens(self) -> int | None:
        """The number of tokens in a step; None if `token_dims` is empty."""
        names = self._token_names
        inputs = sorted(self.graph.inputs.values(), key=lambda t: is_float(t.dtype))  # texts, then spectra
        found = next((t.shape for t in inputs if set(names) <= set(t.shape.names)), None)
        if found is None and names:
            listed = "; ".join(f"{name} [{t.shape}]" for name, t in self.graph.inputs.items()) or "none"
            why = f"Model: no input has the token_dims {', '.join(names)}"
            raise UserError(f"{why}; name dimensions of one of the inputs: {listed}")
        return math.prod(found.dim(n).size for n in names) if found and names else None

    @property
    def step_graph(self) -> Graph:
        """The graph with gradients and updates."""
        return self.training_step().graph

    def second_runs(self, to_the_end: bool) -> Self:
        """The same model with recomputation as some software has it (`Graph.to_the_end`)."""
        whole = self.training_step()
        if whole.graph.to_the_end == to_the_end:
            return self
        version, other = self._others.get(to_the_end, (-1, self))
        if version != whole.graph.version:
            other, graph = copy(self), copy(whole.graph)
            graph.to_the_end = to_the_end
            other._whole = replace(whole, graph=graph)
            other._others = {not to_the_end: (graph.version, self)}
            self._others[to_the_end] = whole.graph.version, other
        return other

    def training_step(
        self,
        microbatches: int = 1,
        stages: Mapping[str, int] = NO_STAGES,
        schedule: str = GPIPE,
        again: Policies = NOTHING,
    ) -> TrainingStep:
        """Forward, backward and update as one graph. With several microbatches, gradients are accumulated
        over them. With `stages` (dimension of layers -> their number) they pass through a pipeline, in the
        order of a schedule (`ir.schedules`); `again` lists the parts of stages that backward recomputes
        (`lower.remat_policy.of_stages`)."""
        whole = self._whole = self._whole or self._whole_step(self.loss, self.metrics)
        if not stages:
            return self._added_up(microbatches) if microbatches != 1 else whole
        key = microbatches, schedule, again, *sorted(stages.items())
        return self._remade(key, lambda: self._pipelined(microbatches, stages, schedule, again))

    def _remade(self, key: Hashable, make: Callable[[], TrainingStep]) -> TrainingStep:
        """A step that is made of the whole one, once for each key."""
        whole = self.training_step()
        version, step = self._others.get(key, (-1, whole))
        if version != whole.graph.version:
            self._others[key] = _, step = whole.graph.version, make()
        return step

    def step_of(self, mesh: Mesh, layout: Layout, options: Options) -> TrainingStep:
        """The training step as a layout and options have it."""
        stages = self.stages(mesh, layout)
        again = of_stages(options.recompute, stages)
        return self.training_step(options.microbatches, stages, options.schedule, again)

    def stages(self, mesh: Mesh, layout: Layout) -> dict[str, int]:
        """The stages of pipelines under a layout: dimensions of layers that it splits -> how often."""
        counted = loop_dims(self.graph)
        split = ((n, axes) for n, axes in layout.rules if n in counted and set(axes) <= {*mesh.names})
        return {name: n for name, axes in split if (n := mesh.group_size(axes)) > 1}

    def _whole_step(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> TrainingStep:
        graph = graph_of(loss)
        trained = [v for v in graph.variables.values() if v.trainable]
        grads = gradients(self.optimizer.scaled_loss(loss), [graph.read(v) for v in trained])
        missing = [v.name for v, g in zip(trained, grads, strict=True) if g is None]
        if missing:
            raise UserError(
                f"model {self.name!r}: the loss does not depend on the variables "
                f"{', '.join(missing[:5])}; remove them or declare them with trainable=False"
            )
        # The update widens what it reads; until then a gradient lies and travels in the width it is made in.
        pairs = [(v, unwidened(g)) for v, g in zip(trained, grads, strict=True) if g is not None]
        as_updates(graph)
        apply_updates(graph, self.optimizer, pairs)
        return TrainingStep(graph, {"loss": loss, **metrics}, tuple(pairs))

    def _pipelined(
        self, microbatches: int, stages: Mapping[str, int], schedule: str, again: Policies
    ) -> TrainingStep:
        if len(stages) > 1:
            raise LayoutError(
                f"pipeline stages of {' and '.join(stages)}: microbatches pass the stages of a single "
                "dimension of layers; split only one of these"
            )
        ((dim, count),) = stages.items()
        check_stages(self.graph, dim, count, schedule)
        whole = self._added_up(microbatches, dim, schedule)
        second = next((layers_again(whole.graph, each) for each in again), None)
        given = str(self.batch_dim), microbatches, dim, count, schedule, second
        return self._with_updates(whole, PipelinedStep(whole.graph, *given))

    def _added_up(self, microbatches: int, layers: str = "", schedule: str = "") -> TrainingStep:
        """The step in microbatches, which may pass stages of layers."""
        if self.batch_dim is None:
            what = f"the microbatches of a pipeline over {layers}" if layers else "microbatches"
            raise LayoutError(
                f"model {self.name!r}: {what} need inputs with a common first dimension; give all inputs the "
                f"same first dimension, or {f'do not split {layers}' if layers else 'use one microbatch'}"
            )
        whole, refuse = self.training_step(), partial(refused, schedule, layers) if layers else None
        given = whole.graph, self.batch_dim, microbatches, refuse
        return self._remade((microbatches, ""), lambda: self._with_updates(whole, Accumulation(*given)))

    def _with_updates(self, whole: TrainingStep, copy: Accumulation | PipelinedStep) -> TrainingStep:
        """The step that a copy of forward and backward makes, with updates."""
        wanted = {**whole.results, **{f"gradient of {v.name}": g for v, g in whole.gradients}}
        graph, found = copy.run(wanted)
        pairs = [(graph.variables[v.name], found[f"gradient of {v.name}"]) for v, _ in whole.gradients]
        apply_updates(graph, self.optimizer, pairs)
        return TrainingStep(graph, {n: found[n] for n in whole.results}, tuple(pairs))

    def notes(self, options: Options) -> tuple[str, ...]:
        """Notes for readers of a plan with these options: float16 without a loss scale, and for an imported
        model, where it differs from its author's."""
        if self.optimizer.loss_scale is not None or not self._backward_in("float16"):
            return (*self.remarks,)
        how = "--set dtype=bfloat16" if "dtype" in self.hparams else "bfloat16"
        return (
            *self.remarks,
            "gradients are float16 and the loss is not scaled, so gradients below 6e-8 become 0 "
            f"(Micikevicius et al. 2018, section 3.2); train in {how}, or give the optimizer a loss_scale",
        )

    def _backward_in(self, dtype: str) -> bool:
        """Whether a gradient of the step is made in an element type."""
        graph = self.step_graph
        made = (graph.tensor(o) for n, _ in graph.walk() if n.phase == Phase.BACKWARD for o in n.outputs)
        return graph.remembered(("backward in", dtype), lambda: dtype in {x.dtype for x in made})

    def lower(self, mesh: Mesh, layout: Layout, options: Options = DEFAULT, *, check: bool = True) -> Program:
        """The training step as an SPMD program; `check` as in `lower`."""
        if options.diloco is not None:
            return self.replicas(mesh, layout, options, check=check).inner
        stages = self.stages(mesh, layout)
        step = self.step_of(mesh, layout, options)
        check_offload(options.offload, step.graph.variables)
        if options.schedule != GPIPE and not stages:
            raise UserError(
                f"schedule {options.schedule}: a schedule needs pipeline stages, and the layout has none; "
                "split the dimension of a loop over layers, e.g. layers:pipe, or remove the schedule"
            )
        again = of_stages(options.recompute, stages)
        options = replace(options, recompute=options.recompute - again)
        said = options.recompute, options.offload
        check_saved(*said, self.step_graph, step.graph, f"schedule {options.schedule}")
        return lower(step.graph, mesh, layout, step.results, options, check=check)

    def replicas(
        self, mesh: Mesh, layout: Layout, options: Options, *, check: bool = True
    ) -> ReplicaPrograms:
        """The step of replicas that train alone, and their outer step; `check` as in `lower`."""
        check_whole(options.diloco, self.stages(mesh, layout), options.schedule)
        step = self.training_step(options.microbatches)
        check_offload(options.offload, step.graph.variables)
        check_saved(options.recompute, options.offload, step.graph, step.graph, "")
        return lower_replicas(step.graph, step.results, mesh, layout, options, check)


@dataclass(frozen=True)
class Training:
    """The training of a model: hyperparameters that model files have in common.

    Attributes:
      dtype: element type of activations; variables and their updates are float32.
      optimizer: sgd, adam or adafactor.
      clip_norm: limit of the norm of all gradients together; larger gradients are scaled down. 0 disables
        clipping.
      warmup: steps in which the learning rate rises; afterwards it falls with the square root of the step.
        0 keeps it constant.
      float8: recipe of the products of layers with their weights (`mtf.float8_einsum`): tensor, fixed,
        rowwise, blocks or mxfp8; "": in `dtype`. Layers outside of loops (embedding, output) keep `dtype`.
      moments: element type of Adam's averages, such as bfloat16.
    """

    dtype: str = "float32"
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    clip_norm: float = 0.0
    warmup: int = 0
    float8: str = ""
    moments: str = "float32"

    def graph(self, name: str) -> Graph:
        """A new graph whose layers multiply by the recipe."""
        graph = Graph(name)
        if self.float8:
            recipe_named(self.float8)
            graph.float8_loops = self.float8
        return graph

    def model(
        self,
        loss: Tensor,
        name: str,
        tokens: Sequence[Dim] = (),
        metrics: Mapping[str, Tensor] | None = None,
        **more: Any,
    ) -> Model:
        """The model of a loss, so trained; `tokens` are its `token_dims`, `more` other fields of `Model`.

        Raises:
          UserError: nothing in the graph multiplies by the float8 recipe.
        """
        if self.float8 and not any(isinstance(n.op, ScaledProduct) for n, _ in graph_of(loss).walk()):
            raise UserError(
                f"float8={self.float8}: no layer in a loop of {name!r} multiplies by weights, so nothing "
                "would be in float8; leave float8 out"
            )
        optimizer = self.optimizer_of()
        return Model(loss, optimizer, metrics=metrics or {}, name=name, token_dims=tokens, **more)

    def optimizer_of(self) -> Optimizer:
        """The optimizer alone."""
        rate, clip = self.learning_rate, self.clip_norm
        return by_name(self.optimizer, rate, clip, warmup=self.warmup, moments=self.moments)


def minimize(loss: Tensor, optimizer: Optimizer) -> None:
    """Adds the gradients of the loss and the update of every trained variable to the graph."""
    Model(loss, optimizer).training_step()


@dataclass(frozen=True)
class TrainingStep:
    """The graph of one step.

    Attributes:
      results: name -> scalar that the step returns.
      gradients: (variable, its gradient in the graph).
    """

    graph: Graph
    results: Mapping[str, Tensor]
    gradients: tuple[tuple[Variable, Tensor], ...]


def _fingerprint(graph: Graph) -> str:
    digest = hashlib.sha256()
    for node, times in graph.walk():
        types = " ".join(str(graph.tensor(o).type) for o in node.outputs)
        digest.update(f"{node.op.describe()} {node.inputs} {types} {times}\n".encode())
    return digest.hexdigest()[:16]
