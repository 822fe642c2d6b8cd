"""From a configuration file to a model function, as a model file has one."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from layoutopt.importers.huggingface.decoder import LanguageModel
from layoutopt.importers.huggingface.fields import NOTHING, ConfiguredTraining, Fields, class_defaults, read
from layoutopt.importers.huggingface.form import FORMS, SAME
from layoutopt.importers.huggingface.weights import checkpoint_names, module_tensors
from layoutopt.plan.exported import MODULES, ExportedTensor
from layoutopt.plan.units import plural
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.graph import graph_of
from mesh_tf_core.training.weights import Source

if TYPE_CHECKING:
    from layoutopt.plan.build import Plan

ALSO = {
    "MiMoForCausalLM": "qwen2",
    "MiniMaxM1ForCausalLM": "minimax",
    "MiniMaxText01ForCausalLM": "minimax",
    "PhiMoEForCausalLM": "phimoe",
}
"""Architectures of other names -> the family that they are."""
TEXTS = ("text_config", "llm_config", "language_config")
PARTS = ("vision_config", "audio_config", "encoder_config")
"""Parts of a model of several media, where the first of `TEXTS` is the language model."""
DTYPES = ("dtype", "torch_dtype")
INHERITED = (*DTYPES, "tie_word_embeddings", "quantization_config")
"""Fields of the whole that hold for its text part, unless that says otherwise."""
PREDICTING = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
"""Numbers of layers that predict further tokens, which no class of transformers has."""
FURTHER = "multi-token prediction"
LENGTH = 2048
"""Default number of tokens of a text; fewer if the model has fewer positions."""
OURS = "layoutopt's choice"
"""Why a hyperparameter has its value, where a configuration has none."""
_COUNTS = dict.fromkeys(("tokens", "text", "targets"), "vocab")
_COUNTS |= {"segments": "segment_kinds", "label": "classes"}
"""Input -> the dimension whose elements it names."""
_OWN_DTYPES = ("float32", "bfloat16", "float16")


def from_huggingface(config: str | Path | Mapping[str, Any], **changes: Any) -> Model:
    """Builds the model that a Hugging Face configuration describes.

    Args:
      config: the path of a config.json, or its parsed content.
      changes: hyperparameters of training (`ConfiguredTraining`), such as `batch=8`, and new values for
        fields of the configuration.

    Raises:
      UserError: the architecture or a field is not supported, or a hyperparameter is unknown.

    Example:
      >>> import layoutopt
      >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
      >>> config = {"model_type": "llama", "vocab_size": 256, "num_hidden_layers": 2, **sizes}
      >>> layoutopt.from_huggingface({**config, "max_position_embeddings": 128}, batch=8).parameters
      115008
    """
    found = _read(config)
    known, changes = _hyperparameters(found), dict(_in_our_names(changes, found.family))
    for name in changes:
        if name not in known:
            raise UserError(f"{found.source} has no hyperparameter {name!r}; {known_names(name, known)}")
    given = {**known, **changes}
    model = _built(found, given)
    model.hparams = given
    model.assumed = dict.fromkeys(known, "") | found.open
    model.assumed = {n: why for n, why in model.assumed.items() if n not in changes}
    return model


def names_of(config: str | Path | Mapping[str, Any], **changes: Any) -> dict[str, Source]:
    """The locations in a Hugging Face checkpoint of the weights of `from_huggingface(config, **changes)`: the
    argument `names` of `Trainer.load(folder, names)`.

    Raises:
      UserError: the checkpoints of the family are not supported.
    """
    model, found = from_huggingface(config, **changes), _read(config)
    if (names := _sources(found, model)) is None:
        raise UserError(
            f"{found.source}: checkpoints of model_type {found.family!r} combine arrays that are separate "
            "variables in layoutopt, so their weights cannot be mapped; split the arrays and load them by "
            "the names of the variables"
        )
    return names


def _sources(found: Configuration, model: Model) -> dict[str, Source] | None:
    """The weights of a model in checkpoints of its family; None if they are not arrays of their own."""
    variables = {n: v for n, v in graph_of(model.loss).variables.items() if v.trainable}
    made = found.reads(found.fields(model.hparams), ConfiguredTraining(batch=1, length=1))
    names = dict(checkpoint_names(made, found.family, model.hparams["length"], variables))
    return names if names.keys() == variables.keys() else None


@dataclass
class ConfiguredModel(Model):
    """The model of a configuration.

    Attributes:
      found: the configuration.
      written: hyperparameters of how parts of it are written, which change it -> their values.
    """

    found: Configuration | None = field(default=None, repr=False, compare=False)
    written: Mapping[str, str] = field(default_factory=dict)

    def written_as(self, choices: Mapping[str, str]) -> Model:
        """The model with `choices` where its user made none, and this one as `given`."""
        own: Any = self.given or self
        said = {n: v for n, v in choices.items() if n in own.written and not self.hparams.get(n)}
        if (made := {**own.written, **said}) == own.written:
            return cast(Model, own)
        if (key := tuple(made.items())) not in own._others:
            new = _built(own.found, {**self.hparams, **made})
            own._others[key] = 0, replace(new, given=own, hparams=own.hparams, assumed=own.assumed)
        return cast(Model, own._others[key][1])

    @property
    def family(self) -> str:
        """Its `model_type`."""
        return "" if self.found is None else self.found.family

    def modules(self, plan: Plan) -> dict[str, tuple[ExportedTensor, ...]]:
        """The parameters of the modules of transformers, as a plan splits them; none if some have no array of
        their own there."""
        assert self.found is not None
        names, variables = _sources(self.found, self) or {}, self.graph.variables
        return {MODULES: tuple(module_tensors(names, variables, plan.layout))}


def module_of(path: Path, shown: str) -> ModuleType:
    """A module with the functions `model` and `data` of a configuration, as a model file would have them.

    Args:
      shown: the file's name in errors.
    """
    found = chosen(read(path, shown), shown)
    known = _hyperparameters(found)

    def model(**hparams: Any) -> Model:
        return _built(found, hparams)

    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=v) for n, v in known.items()]
    model.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def data(split: str = "train", **hparams: Any) -> Iterator[dict[str, np.ndarray]]:
        return _random(_built(found, hparams), split)

    def assumed(devices: int | None) -> dict[str, tuple[Any, str]]:
        """What no configuration says: hyperparameter -> its value on so many devices, and why."""
        ways = max(1, devices or 1)
        batch = -(-known["batch"] // ways) * ways
        each = f"{plural(batch // ways, 'example')} per device" if devices else OURS
        return {n: (known[n], why) for n, why in found.open.items()} | {"batch": (batch, each)}

    made = ModuleType("configuration", f"The model of {shown}.")
    model.assumed = assumed  # type: ignore[attr-defined]
    also = class_defaults()["renamed"].get(found.family, NOTHING).items()
    model.also = {n: ours for n, ours in also if ours}  # type: ignore[attr-defined]
    made.model, made.data = model, data  # type: ignore[attr-defined]
    return made


def _read(config: str | Path | Mapping[str, Any]) -> Configuration:
    if isinstance(config, Mapping):
        return chosen(config, "the configuration")
    return chosen(read(Path(os.path.expanduser(config)), str(config)), str(config))


@dataclass(frozen=True)
class Configuration:
    """The content of a file about the model that is built.

    Attributes:
      values: the fields, of the whole file or of its text part.
      source: the file, and the part, for errors.
      family: of `FORMS`; remarks: where the model is not what the file calls itself, in words.
    """

    values: Mapping[str, Any]
    source: str
    family: str
    remarks: tuple[str, ...] = ()

    @property
    def open(self) -> dict[str, str]:
        """Hyperparameters that no configuration says, or this one does not, and whose value each has."""
        named = any(self.values.get(name) for name in DTYPES)
        return {"batch": OURS, "length": OURS} | ({} if named else {"dtype": "the file names none"})

    def reads(self, fields: Fields, training: ConfiguredTraining) -> LanguageModel | Model:
        with fields.named():
            return FORMS[self.family][1].read(fields, training)

    def fields(self, changed: Mapping[str, Any] = NOTHING) -> Fields:
        """The fields, some with other values."""
        told = class_defaults()
        sizes, known = (told[n].get(self.family, NOTHING) for n in ("families", "read"))
        idle = _idle(self.family)
        known = {*known, *told["read"]["all"], *sizes} - {*idle} if known is not NOTHING else ()
        idle = [*told["without_effect"]["all"], *idle]
        return Fields({**self.values, **changed}, self.source, sizes, known, idle)


def chosen(values: Mapping[str, Any], source: str) -> Configuration:
    """The model that a file describes, or its text part, if only that can be built; UserError if neither."""
    if isinstance(thinker := values.get("thinker_config"), Mapping):  # of a model that also speaks
        return chosen(thinker, f"{source}: thinker_config")
    name = next((n for n in TEXTS if isinstance(values.get(n), Mapping)), TEXTS[0])
    text, where = values.get(name), f"{source}: {name}"
    if text is None and (flat := f"{values.get('model_type')}_text") in FORMS:  # as older files are
        text, name, where = {**values, "model_type": flat, "architectures": None}, "the text model", source
        text = {n: v for n, v in text.items() if n not in PARTS}
    told = text if isinstance(text, Mapping) else values
    kind, of_text = (str(part.get("model_type"))[:60] for part in (values, told))
    lacking = class_defaults()["lacks"]
    if isinstance(text, Mapping) and kind not in lacking and (family := _family(text)) is not None:
        inherited = {n: values[n] for n in INHERITED if n in values}
        inner = {**inherited, **{n: v for n, v in text.items() if v is not None or n not in inherited}}
        others = [n for n in PARTS if isinstance(values.get(n), Mapping)]
        left = f", without its {' and '.join(others)}" if others else ""
        said = f"only {name} of {source} is planned{left}"
        known = _in_our_names(inner, family)
        return Configuration(known, where, _checked(inner, where, family), (said, *_renamed(inner, family)))
    if (family := _family(values)) is not None:
        known = _in_our_names(values, family)
        return Configuration(known, source, _checked(values, source, family), (*_renamed(values, family),))
    also = f", nor is its {name} ({of_text!r})" if isinstance(text, Mapping) else ""
    lacks = next(filter(None, map(lacking.get, (kind, of_text, f"{kind}_text"))), "")
    close = [n for k in (kind, of_text) if k != "None" for n in get_close_matches(k, FORMS, 3)]
    near = f"nearest: {', '.join(dict.fromkeys(close))}; " if close else ""
    found = f"model_type {kind!r} is not supported" if values.get("model_type") else "it has no model_type"
    raise UserError(
        f"{source}: {found}{also}{lacks and f'; layoutopt lacks {lacks}'}; "
        f"{near}all {len(FORMS)} are in docs/guides/huggingface.md; write this model with "
        "mesh_tf_core.layers (layoutopt init), or import it with layoutopt.from_torch or "
        f"layoutopt.from_jax{_foreign(told)}"
    )


def _foreign(values: Any) -> str:
    """The fields of a configuration that no class of a known family has."""
    known = class_defaults()
    every = {n for part in known.values() if isinstance(part, dict) for v in part.values() for n in v}
    for _, form in FORMS.values():
        every |= {*form.only, *form.names.values(), *(form.mixture.only if form.mixture else ())}
    strange = [
        n for n, v in values.items() if v and n not in every and not n.endswith(("_token_id", "_config"))
    ]
    return f"; no known family has its fields {', '.join(sorted(map(str, strange))[:12])}" if strange else ""


def _family(values: Mapping[str, Any]) -> str | None:
    """The family that a configuration's `model_type`, or else the class that it names, is."""
    name, classes = values.get("model_type"), values.get("architectures")
    if isinstance(name, str) and name in FORMS:
        return name
    listed = classes if isinstance(classes, list) else []
    found = next((n for n, (wanted, _) in FORMS.items() if wanted in listed), None)
    return found or next((family for other, family in ALSO.items() if other in listed), None)


def _in_our_names(values: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """Fields that a family calls otherwise than most, under the usual names, those of parts ("", or PART.NAME
    for one of them) too."""
    usual = class_defaults()["renamed"].get(family, NOTHING)
    parts = [n for n, v in values.items() if usual.get(n) == "" and isinstance(v, Mapping)]
    inner = {
        f"{n}.{m}": v for n, part in values.items() if isinstance(part, Mapping) for m, v in part.items()
    }
    values = {**{n: v for part in parts for n, v in values[part].items()}, **values}
    plain = {n: v for n, v in values.items() if n not in usual and n not in parts}
    said = {**inner, **values}
    return plain | {new: said[old] for old, new in usual.items() if new and old in said}


def _checked(values: Mapping[str, Any], source: str, family: str) -> str:
    """The family; UserError if the file names another class of it."""
    classes, wanted = values.get("architectures") or [], FORMS[family][0]
    same = [wanted, FORMS[SAME.get(family, family)][0]]
    known = {*same, *map(headless, same), *(n for n, other in ALSO.items() if other == family)}
    if not isinstance(classes, list) or (classes and known.isdisjoint(map(str, classes))):
        raise UserError(
            f"{source}: architectures is {str(classes)[:100]}, but for model_type {family!r} "
            f'layoutopt builds only {wanted}; to plan {wanted}, write "architectures": ["{wanted}"]'
        )
    return family


def headless(name: str) -> str:
    """The class of a model without its head."""
    return re.sub(r"(For[A-Z]\w*|LMHeadModel)$", "Model", name)


def _renamed(values: Mapping[str, Any], family: str) -> Iterator[str]:
    """Where a file calls itself something else, or stores weights that training has not."""
    if values.get("model_type") != family:
        said = str(values.get("model_type"))[:60]
        yield f"model_type {said!r} is built as {FORMS[family][0]}, the architecture that the file names"
    wanted = FORMS[family][0]
    if (base := headless(wanted)) != wanted and base in (values.get("architectures") or []):
        yield f"{base} of architectures has no loss, so the model is built as {wanted}"
    told = {**class_defaults()["families"].get(family, NOTHING), **values}
    if dropped := [n for n in _idle(family) if n.endswith(("dropout", "drop")) and told.get(n)]:
        yield f"these layers do not apply {' and '.join(dropped)} of the configuration"
    if none := [n for n in ("num_experts", "num_local_experts", "n_routed_experts") if values.get(n) == 0]:
        yield f"{none[0]} is 0, so all layers are dense"
    if more := next((values[n] for n in PREDICTING if isinstance(values.get(n), int) and values[n] > 0), 0):
        said = f"{plural(more, 'layer')} of {FURTHER} {'is' if more == 1 else 'are'} not planned"
        yield f"{said}; add {'it' if more == 1 else 'them'} with --set mtp={more}"
    if values.get("quantization_config"):
        yield "quantization_config is ignored: it describes the published weights, not those of training"


def _idle(family: str) -> Any:
    """Fields of a family that change nothing."""
    return class_defaults()["without_effect"].get(family, ())


def _hyperparameters(found: Configuration) -> dict[str, Any]:
    """What may be set: of training, and the plain fields of the configuration that its family reads."""
    fields = found.fields()
    own = asdict(ConfiguredTraining(length=_length(found.family, fields), dtype=_dtype(found)))
    found.reads(fields, ConfiguredTraining(batch=1, length=1))
    read = {n: v for n, v in fields.asked.items() if n in fields.values and n not in own}
    return {**own, **{n: v for n, v in read.items() if isinstance(v, bool | int | float | str)}}


def _built(found: Configuration, hparams: Mapping[str, Any]) -> Model:
    """The model of a configuration with changed values."""
    own = {f.name: hparams[f.name] for f in fields_of(ConfiguredTraining) if f.name in hparams}
    training = ConfiguredTraining(**own)
    fields = found.fields({n: v for n, v in hparams.items() if n not in own})
    made = found.reads(fields, training)
    for other in DTYPES:
        fields.raw(other)
    fields.finish(training.ignore.replace(" ", "").split(","))
    with fields.named():
        model = made.model(found.family, training) if isinstance(made, LanguageModel) else made
    if training.mtp and not isinstance(made, LanguageModel):
        raise UserError(f"{found.source}: mtp={training.mtp} needs a language model; remove mtp")
    known = (r for r in found.remarks if not training.mtp or FURTHER not in r)
    remarks = (*known, *made.remarks, *fields.omitted)
    given = {f.name: getattr(model, f.name) for f in fields_of(model)}
    mixed = getattr(made, "mixtures", 0)
    written = {"gates": training.gates or "hidden", "router": training.router} if mixed else {}
    if isinstance(made, LanguageModel):
        written |= {} if made.norm.center else {"norms": training.norms or "library"}
        written |= {"scans": training.scans or "steps"} if made.recurrent else {}
    return ConfiguredModel(**{**given, "hparams": hparams, "remarks": remarks}, found=found, written=written)


def _length(family: str, fields: Fields) -> int:
    name, behind = "max_position_embeddings", FORMS[family][1].behind
    longest = fields.values.get(name, fields.sizes.get(name))
    if isinstance(behind, str) and isinstance(longest, int):
        longest -= fields.count(behind, least=0) + 1
    return min(LENGTH, longest) if isinstance(longest, int) and longest > 0 else LENGTH


def _dtype(found: Configuration) -> str:
    # Trainers undo the quantisation of published weights in bfloat16.
    usual = "bfloat16" if found.values.get("quantization_config") else "float32"
    said = found.values.get("dtype") or found.values.get("torch_dtype") or usual
    if said not in _OWN_DTYPES:
        raise UserError(
            f"{found.source}: torch_dtype {str(said)[:60]!r}; {known_names(str(said)[:60], _OWN_DTYPES)}"
        )
    return str(said)


def _random(model: Model, split: str) -> Iterator[dict[str, np.ndarray]]:
    """Random numbers for every input: enough for times, memory and a loss; nothing is learned from them."""
    rng, inputs, dims = np.random.default_rng(len(split)), model.graph.inputs, model.graph.dims()
    while True:
        yield {
            name: rng.integers(0, min(dims[_COUNTS[name]]), t.shape.sizes).astype(np.int32)
            if name in _COUNTS
            else rng.normal(size=t.shape.sizes).astype(np.float32)
            for name, t in inputs.items()
        }
