"""Small modules of every model type of transformers, made from the names of the fields of their
configurations, each with a batch from the names of its arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TASKS = (
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "CAUSAL_LM",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "VIDEO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "VISUAL_QUESTION_ANSWERING",
    "MASKED_IMAGE_MODELING",
    "PRETRAINING",
    "TIME_SERIES_PREDICTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
)
ROWS, LENGTH, VOCAB, IMAGE, LARGEST = 2, 16, 112, 64, 40_000_000
INTS = (
    (r"num_feat_extract_layers|_every|temporal|merge_size|vision_feature_layer", 10**9),
    (r"^window_size$|layer_period", 2),
    (r"layer_offset", 1),
    (r"mm_tokens_per_image|image_seq_length", 4),
    (r"^max_length$", 64),
    (r"vocab_size$|vocab_size_", VOCAB),
    (r"codebook_size|num_embeddings$|num_codevectors_per_group|type_vocab_size", 8),
    (r"^(num|moe_num|n)_?(local|routed)?_?experts$", 4),
    (r"experts_per_tok|moe_top_?k|^top_k|num_selected", 2),
    (r"^n_group$", 2),
    (r"topk_group|num_nextn|first_k_dense_replace|num_dense_layers", 1),
    (r"(^|_)(layers|depth|layer|blocks|depths)$|num_hidden_layers|num_layers", 4),
    (r"key_value_heads|kv_heads", 2),
    (r"(^|_)(heads|head|n_heads|attention_heads|num_heads)$|num_attention_heads", 4),
    (r"head_dim|d_kv$|dim_head|d_head|rotary_dim", 8),
    (r"lora_rank|_rank$|state_size|d_state|ssm_state", 8),
    (r"moe_.*(intermediate|ffn|hidden)|expert.*(intermediate|ffn)", 16),
    (r"intermediate|ffn|d_ff$|mlp_dim|n_inner|feedforward", 48),
    (
        r"hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|projection_dim|^dim$|embedding_dim",
        32,
    ),
    (r"proj_dim|projection_size|output_dim|decoder_dim|emb_dim|feature_size|pooler_output_size", 32),
    (r"fusion_hidden|neck_.*|projector|output_channels|base_channels|num_filters|stem_channels|conv_dim", 32),
    (r"(image|input|img|crop)_size$", IMAGE),
    (r"position_embeddings|n_positions|max_.*positions|context_length|max_seq|sequence_length", 64),
    (r"sliding_window|attention_window|local_attention|chunk_size$|block_size|index_topk", 8),
    (r"num_mel_bins|n_mels|num_queries|num_query_tokens|num_latents|codevector_dim", 16),
    (r"classifier_proj_size|num_frames", 8),
)
"""Pattern of an integer field -> its size, where that is smaller."""


class Unbuilt(Exception):
    """PyTorch does not run what the reduction made."""


@dataclass(frozen=True)
class Made:
    """A module with a batch; `loss`: of a module that returns none; `drawn`: it draws random numbers."""

    module: Any
    batch: dict[str, Any]
    loss: Callable[..., Any] | None
    task: str
    drawn: bool


def known() -> dict[str, tuple[str, str]]:
    """Model type -> its first task, and the name of its class."""
    found: dict[str, tuple[str, str]] = {}
    for task in TASKS:
        for kind, name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            found.setdefault(kind, (task, name))
    for kind, name in modeling_auto.MODEL_MAPPING_NAMES.items():
        found.setdefault(kind, ("base", name if isinstance(name, str) else name[0]))
    return found


def _small(name: str, value: Any, wide: bool) -> Any:
    """A smaller value of a field."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        if re.search(r"drop|mask_(time|feature)_prob|jitter|noise", name):
            return 0.0
        return value
    if isinstance(value, int):
        for pattern, size in INTS:
            if re.search(pattern, name):
                kept = wide and size in (32, 48, 8, 16) and "layers" not in name
                return value if kept else min(value, size)
        return 0 if "drop" in name else value
    if isinstance(value, list | tuple) and value and all(type(x) is int for x in value):
        if re.search(r"indices|indexes|feature_layers?$", name):
            return [min(x, 4 - len(value) + i) if x >= 0 else x for i, x in enumerate(value)]
        if re.search(r"depths|num_blocks|blocks$|layers$|num_layers", name):
            return [min(x, 2) for x in value]
        if re.search(r"image_size|input_size|img_size", name):
            return [min(x, IMAGE) for x in value]
        if not wide and re.search(r"hidden_sizes|embed_dims|channels|conv_dim|dims$|sizes$|embed_dim", name):
            least = max(min(x for x in value if x > 3), 1) if any(x > 3 for x in value) else 1
            return [x if x <= 3 else max(8 * x // least, 8) for x in value]
        if re.search(r"heads", name):
            least = max(min(value), 1)
            return [max(x // least, 1) for x in value]
    return value


def reduced(config: Any, wide: bool) -> Any:
    """A configuration of the same class with fewer layers, and smaller widths unless `wide`."""
    given: dict[str, Any] = {}
    taken = inspect.signature(type(config).__init__).parameters
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            given[name] = reduced(value, wide)
        elif not name.startswith("_") and (small := _small(name, value, wide)) != value:
            given[name] = small
    vocab = given.get("vocab_size", getattr(config, "vocab_size", None))
    text = next((given[n] for n in ("text_config", "thinker_config", "llm_config") if n in given), None)
    vocab = vocab or getattr(text, "vocab_size", VOCAB)
    number = 0
    for name, value in vars(config).items():
        if (
            re.search(r"token_id$|token_index$|_id$|_token$", name)
            and type(value) is int
            and vocab
            and value >= vocab
        ):
            number += 1
            given[name] = vocab - number
        if re.search(r"(token_ids?|eos_token_id)$", name) and isinstance(value, list | tuple):
            given[name] = vocab - 1
    old, new = getattr(config, "num_hidden_layers", None), given.get("num_hidden_layers")
    for name, value in vars(config).items():
        each = isinstance(value, list | tuple) and re.search(r"layer|type|freq|rope", name)
        if each and old and new and len(value) == old and name not in given:
            given[name] = _pattern(list(value), new)
    if not wide and "embed_dim" in given and isinstance(getattr(config, "num_heads", None), list | tuple):
        given["embed_dim"] = 16
    for expand, heads, each in (
        ("expand", "num_heads", "head_dim"),
        ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ):
        if hasattr(config, expand) and hasattr(config, heads) and hasattr(config, each):
            inner = int(getattr(config, expand) * given.get("hidden_size", config.hidden_size))
            given[heads] = inner // given.get(each, getattr(config, each))
    own = {n: v for n, v in given.items() if n in taken or hasattr(config, n)}
    made = type(config)(**own)
    if getattr(made, "is_encoder_decoder", False) and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 0
    return made


def _pattern(listed: list[Any], count: int) -> list[Any]:
    """A shorter list with as many different elements as it can have."""
    if len({map(str, listed)}) == 1 or len(set(map(str, listed[:count]))) == len(set(map(str, listed))):
        return listed[:count]
    other = next((x for x in listed[count:] if x not in listed[:count]), listed[-1])
    return [*listed[: count - 1], other]


def _classes(config: Any) -> int:
    return int(getattr(config, "num_labels", 2) or 2)


def _size(config: Any, *names: str, default: Any) -> Any:
    for own in (
        config,
        *(
            getattr(config, n, None)
            for n in ("vision_config", "backbone_config", "audio_config", "text_config")
        ),
    ):
        for name in names:
            value = getattr(own, name, None) if own is not None else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                return value[0]
    return default


def batch_of(module: Any, task: str) -> dict[str, Any]:
    """A batch for the arguments of a module that it knows by name."""
    config, names = module.config, inspect.signature(module.forward).parameters
    text = getattr(config, "text_config", None) or config
    vocab = min(getattr(text, "vocab_size", None) or VOCAB, VOCAB)
    special = {v for c in (config, text) for n, v in vars(c).items() if "token" in n and isinstance(v, int)}
    plain = torch.tensor([i for i in range(vocab) if i not in special] or [0])
    ids = plain[torch.randint(0, len(plain), (ROWS, LENGTH))]
    size = _size(config, "image_size", "input_size", "img_size", default=IMAGE)
    channels = _size(config, "num_channels", "in_channels", "in_chans", default=3)
    video = _size(config, "num_frames", "frames", default=4)
    mels = _size(config, "num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", default=16)
    frames = 2 * min(_size(config, "max_source_positions", default=64), 64)
    batch: dict[str, Any] = {}
    if "input_ids" in names and not (task in ("CTC",) and "input_features" in names):
        batch["input_ids"] = ids
        if "attention_mask" in names:
            mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
            mask[-1, -3:] = 0
            batch["attention_mask"] = mask
    if "pixel_values" in names and task not in ("CAUSAL_LM",):
        shape = (ROWS, channels, size, size)
        if task == "VIDEO_CLASSIFICATION" or "ideo" in type(module).__name__:
            shape = (ROWS, video, channels, size, size)
        batch["pixel_values"] = torch.randn(shape)
    if "pixel_values_videos" in names and "pixel_values" not in names:
        batch["pixel_values_videos"] = torch.randn(ROWS, video, channels, size, size)
    if "input_values" in names:
        batch["input_values"] = torch.randn(ROWS, 2000)
    if "input_features" in names and "input_values" not in batch:
        wide = "hisper" in type(module).__name__ or "oonshine" in type(module).__name__
        batch["input_features"] = torch.randn((ROWS, mels, frames) if wide else (ROWS, frames, mels))
    if "bbox" in names:
        batch["bbox"] = torch.zeros(ROWS, LENGTH, 4, dtype=torch.int64)
    if "past_values" in names:
        long = _size(config, "context_length", default=64)
        batch["past_values"] = torch.randn(
            ROWS, long, _size(config, "num_input_channels", "input_size", default=1)
        )
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    if "labels" in names:
        batch["labels"] = _labels(config, task, batch, plain, size)
    elif "return_loss" in names:
        batch["return_loss"] = True
    if "decoder_input_ids" in names and ("labels" not in batch or task == "base"):
        batch["decoder_input_ids"] = ids.clone()
    return batch


def _labels(config: Any, task: str, batch: Mapping[str, Any], plain: Any, size: int) -> Any:
    classes = _classes(config)
    if task in (
        "IMAGE_CLASSIFICATION",
        "VIDEO_CLASSIFICATION",
        "AUDIO_CLASSIFICATION",
        "SEQUENCE_CLASSIFICATION",
    ):
        return torch.arange(ROWS) % classes
    if task == "SEMANTIC_SEGMENTATION":
        return torch.randint(0, classes, (ROWS, size, size))
    if task in ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION"):
        boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.1, 0.1]])
        return [{"class_labels": torch.tensor([0, 1]), "boxes": boxes} for _ in range(ROWS)]
    if task == "DEPTH_ESTIMATION":
        return torch.rand(ROWS, size, size)
    if task == "CTC":
        return plain[torch.randint(1, len(plain), (ROWS, 3))]
    if "input_ids" in batch and task != "SEQ_TO_SEQ_CAUSAL_LM":
        labels = batch["input_ids"].clone()
        labels[-1, -3:] = -100
        return labels
    return plain[torch.randint(0, len(plain), (ROWS, LENGTH - 4))]


def squares(outputs: Any, batch: Any) -> Any:
    """A loss of a module that has none: the mean square of its first results."""
    listed = [
        x
        for x in torch.utils._pytree.tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
        if torch.is_tensor(x) and x.is_floating_point() and x.requires_grad
    ]
    return listed[0].float().square().mean()


def made(kind: str) -> Made:
    """The module of a model type, with a batch on which PyTorch runs it.

    Raises:
      Unbuilt: it does not.
    """
    task, name = known()[kind]
    why = ""
    for wide in (False, True):
        try:
            torch.manual_seed(0)
            config = reduced(CONFIG_MAPPING[kind](), wide)
            door = getattr(transformers, name)
            with torch.device("meta"):
                count = sum(p.numel() for p in door(config).parameters())
            if count > LARGEST:
                raise ValueError(f"{count:,} parameters")
            module = door(config).float().train()
            for each in module.modules():  # rates that no field has
                if isinstance(each, torch.nn.modules.dropout._DropoutNd):
                    each.p = 0.0
            batch = batch_of(module, task)
            try:
                batch, loss = _running(module, batch)
            except Exception:
                if "input_ids" not in batch or len(batch) < 4 or "labels" not in batch:
                    raise
                batch = {n: batch_of(module, task)[n] for n in ("input_ids", "attention_mask", "labels")}
                batch, loss = _running(module, batch)
            values = []
            for _ in range(2):
                torch.manual_seed(len(values))
                values.append(
                    float(
                        (module(**batch)["loss"] if loss is None else loss(module(**batch), batch)).detach()
                    )
                )
            if any(v != v for v in values):
                raise ValueError("the loss is nan")
        except Exception as error:  # whatever a configuration that nobody tried makes PyTorch raise
            import traceback

            frames = traceback.extract_tb(error.__traceback__)
            place = frames[-1]
            why += (
                "; wide: " if why else ""
            ) + f"{type(error).__name__}: {str(error)[:300]} ({place.filename}:{place.lineno})"
            continue
        return Made(module, batch, loss, task, values[0] != values[1])
    raise Unbuilt(why)


def _repaired(module: Any, batch: dict[str, Any], said: str) -> dict[str, Any] | None:
    """Another batch, as the module's error asks for it; None: it asks for nothing known."""
    config, names = module.config, inspect.signature(module.forward).parameters
    if "both input_ids and inputs_embeds" in said and "input_features" in batch and "input_ids" in batch:
        return {k: v for k, v in batch.items() if k not in ("input_features", "attention_mask")}
    if re.search(r"bool_masked_pos", said) and "bool_masked_pos" not in batch:
        size = _size(config, "image_size", default=IMAGE) // _size(config, "patch_size", default=16)
        return {**batch, "bool_masked_pos": torch.arange(size * size).expand(ROWS, -1) % 3 == 0}
    if "decoder_input_ids" in said and "decoder_input_ids" in names and "decoder_input_ids" not in batch:
        return {**batch, "decoder_input_ids": torch.ones(ROWS, LENGTH - 4, dtype=torch.int64)}
    if "expected 5, got 4" in said and batch.get("pixel_values") is not None:
        return {**batch, "pixel_values": batch["pixel_values"][:, None]}
    if "Dimension out of range" in said and "input_values" in batch and batch["input_values"].ndim == 2:
        sizes = _size(config, "max_length", default=64), _size(config, "num_mel_bins", default=16)
        return {**batch, "input_values": torch.randn(ROWS, *sizes)}
    if "mm_token_type_ids" in said and "mm_token_type_ids" not in batch:
        return {**batch, "mm_token_type_ids": (batch["input_ids"] == config.image_token_id).long()}
    if "image_grid_thw" in names and "pixel_values" in batch and "image_grid_thw" not in batch:
        v = config.vision_config
        patch = v.patch_size if isinstance(v.patch_size, int) else v.patch_size[0]
        each = 3 * getattr(v, "temporal_patch_size", 1) * patch**2
        grid = torch.tensor([[1, 4, 4]] * ROWS)
        return {**batch, "pixel_values": torch.randn(16 * ROWS, each), "image_grid_thw": grid}
    if (found := re.search(r"length (\d+), but found (\d+)", said)) and "input_features" in batch:
        x = batch["input_features"]
        swapped = x.transpose(1, 2).contiguous()
        if swapped.shape[-1] == int(found[1]):
            return {**batch, "input_features": swapped}
    if (
        found := re.search(r"normalized_shape=\[(\d+)\].*but got input of size\[2, (\d+), (\d+)\]", said)
    ) or (found := re.search(r"(?:shapes cannot be multiplied) \(\d+x(\d+) and (\d+)x", said)):
        key = next((k for k in ("input_features", "pixel_values", "input_values") if k in batch), None)
        want = int(found[1] if "normalized" in said else found[2])
        if key and batch[key].ndim == 3 and batch[key].shape[-1] != want:
            return {**batch, key: torch.randn(*batch[key].shape[:-1], want)}
    return None


def _running(module: Any, batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The batch with which the module runs, and its loss."""
    for _ in range(8):
        try:
            found = module(**batch)
        except Exception as error:
            last = str(error)[:200]
            repaired = _repaired(module, batch, str(error))
            if repaired is not None:
                batch = repaired
                continue
            # As many image tokens as features.
            said = re.search(r"tokens:?\s*(\d+).*?features:?\s*\D*(\d+)", str(error), re.S)
            if said and "input_ids" in batch:
                config = module.config
                token = next(
                    (
                        getattr(config, n)
                        for n in (
                            "image_token_id",
                            "image_token_index",
                            "audio_token_id",
                            "audio_token_index",
                            "video_token_id",
                        )
                        if getattr(config, n, None) is not None
                    ),
                    None,
                )
                each = int(said[2]) // ROWS
                if token is not None and 0 < each < 2000:
                    extra = torch.full((ROWS, each), token)
                    ids = torch.cat([extra, batch["input_ids"]], 1)
                    batch = {**batch, "input_ids": ids}
                    if "attention_mask" in batch:
                        batch["attention_mask"] = torch.cat(
                            [torch.ones_like(extra), batch["attention_mask"]], 1
                        )
                    if "mm_token_type_ids" in batch:
                        batch["mm_token_type_ids"] = (ids == token).long()
                    if "labels" in batch:
                        batch["labels"] = torch.cat([torch.full_like(extra, -100), batch["labels"]], 1)
                    continue
            raise
        loss = found.get("loss") if hasattr(found, "get") else None
        return batch, (None if torch.is_tensor(loss) and loss.ndim == 0 else squares)
    raise ValueError(f"no number of image tokens fits: {last}")
