"""Trains eight small PyTorch modules under searched plans on 4 and 8 processes (gloo), beside one process and
beside the same module under hand-written FSDP2.

    python benchmarks/torch_steps.py [NAME...] [--out FILE] [--ranks N...] [--rounds R]

Loss, gradients and what a rank holds are those of one step in float64. Step times are of float32 and AdamW,
in rounds that alternate with FSDP2 on the same processes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

HARDWARE, FRAMEWORK, BATCH = "cpu-local", "torch", 16
Given = tuple[Any, dict[str, Any], str]
_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SIZES = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 3}


def _texts(kind: str, layers: str, length: int = 32, **more: Any) -> Given:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    ids = torch.randint(0, 1024, (BATCH, length))
    door = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    module = door.from_config(AutoConfig.for_model(kind, vocab_size=1024, use_cache=False, **more))
    return module, {"input_ids": ids, "labels": ids.clone()}, layers


def _llama(kind: str = "llama", **more: Any) -> Given:
    sizes = {**_SIZES, "num_key_value_heads": 2, "head_dim": 48, "max_position_embeddings": 64}
    return _texts(kind, "model.layers", **sizes, **more)


def _gpt2() -> Given:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return _texts("gpt2", "transformer.h", n_positions=64, n_embd=192, n_layer=3, n_head=4, **off)


def _t5() -> Given:
    sizes = {"d_model": 192, "d_kv": 48, "d_ff": 512, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return _texts("t5", "encoder.block decoder.block", **sizes, decoder_start_token_id=0)


def _bert() -> Given:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    ids = torch.randint(0, 1024, (BATCH, 32))
    module = BertForMaskedLM(BertConfig(vocab_size=1024, max_position_embeddings=64, **_SIZES, **_OFF))
    return module, {"input_ids": ids, "labels": ids.clone()}, "bert.encoder.layer"


def _vit() -> Given:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=64, patch_size=8, num_labels=16, **_SIZES, **_OFF)
    batch = {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": torch.arange(BATCH)}
    return ViTForImageClassification(config), batch, "vit.layers"


def _convolutions() -> Given:
    import torch

    from tests.importers.torch_modules import Convolutions

    batch = {"x": torch.randn(BATCH, 3, 32, 32), "y": torch.randint(0, 8, (BATCH,))}
    return Convolutions(64, 4), batch, "layers"


MODULES: dict[str, Callable[[], Given]] = {
    "Llama": _llama,
    "Llama, tied": lambda: _llama(tie_word_embeddings=True),
    "GPT-2": _gpt2,
    "BERT": _bert,
    "T5": _t5,
    "ViT": _vit,
    "Qwen3 with experts": lambda: _llama(
        "qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=192,
        experts_implementation="grouped_mm",
    ),
    "Convolutions with BatchNorm": _convolutions,
}


def made(name: str) -> Given:
    import torch

    torch.manual_seed(0)
    return MODULES[name]()


def _by_hand(given: Given, mesh: Any = None) -> Callable[[], None]:
    """A step of FSDP2 over all ranks, or over the data ranks of a mesh whose tensor ranks split a Llama, as
    tutorials write it."""
    import torch
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel
    from torch.distributed.tensor.parallel import parallelize_module as split

    module, batch, layers = given
    hand, data = copy.deepcopy(module), None if mesh is None else mesh["data"]
    if mesh is not None:
        outer = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
        split(hand, mesh["model"], {**outer, "lm_head": ColwiseParallel(use_local_output=False)})
        if module.config.tie_word_embeddings:
            hand.lm_head.weight = hand.model.embed_tokens.weight
        for layer in hand.model.layers:
            columns = (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
            )
            rows = dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
            split(layer, mesh["model"], {**dict.fromkeys(columns, ColwiseParallel()), **rows})
    for path in layers.split():
        for layer in hand.get_submodule(path):
            fully_shard(layer, mesh=data)
    fully_shard(hand, mesh=data)
    adam = torch.optim.AdamW(hand.parameters())
    count = distributed.get_world_size() if data is None else data.size()
    own = distributed.get_rank() if data is None else data.get_local_rank()
    part = {n: x.chunk(count)[own] for n, x in batch.items()}

    def step() -> None:
        with loss_parallel():
            found = hand(**part)
            (found if torch.is_tensor(found) else found.loss).backward()
        adam.step()
        adam.zero_grad()

    return step


def _stepped(plan: Any, given: Given, rounds: int) -> Any:
    """[ours, FSDP2 by hand, our layout by hand if it splits tensors] x [seconds, CPU seconds of all ranks] x
    rounds."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    module, batch, _ = given
    mesh = plan.ranks.mesh
    devices = init_device_mesh("cpu", tuple(n for _, n in mesh.axes), mesh_dim_names=mesh.names)
    own = plan.parallelize(copy.deepcopy(module), devices)
    step = plan.train_step(own, torch.optim.AdamW(own.parameters()))
    rows = step.rows(batch)
    steps = [lambda: step(rows), _by_hand(given)]
    steps += [_by_hand(given, devices)] if plan.ranks.tensor else []
    each = torch.zeros(len(steps), 2, rounds, dtype=torch.float64)
    for n in range(rounds + 1):
        for i in range(len(steps))[:: 1 if n % 2 else -1]:
            distributed.barrier()
            start = time.perf_counter(), time.process_time()
            steps[i]()
            distributed.barrier()
            if n:  # the first of each is a warm-up
                each[i, 0, n - 1] = time.perf_counter() - start[0]
                each[i, 1, n - 1] = time.process_time() - start[1]
    spent = each[:, 1].contiguous()
    distributed.all_reduce(spent)
    each[:, 1] = spent
    return each.tolist()


def _rank(rank: int, plan: Any, given: Given, port: int, count: int, rounds: int, folder: str) -> None:
    from torch import distributed

    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    distributed.init_process_group("gloo")
    found = _stepped(plan, given, rounds)
    if rank == 0:
        Path(folder, "steps.pickle").write_bytes(pickle.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def one(name: str, ranks: int, rounds: int) -> dict[str, Any]:
    """What is measured of a module."""
    import torch

    import layoutopt
    from tests.importers.torch_ranks import on_ranks

    torch.set_num_threads(1)
    module, batch, layers = made(name)
    model = layoutopt.from_torch(module, batch)
    plan = layoutopt.search(model, devices=ranks, hardware=HARDWARE, framework=FRAMEWORK, alternatives=False)
    found = plan.to_json()
    row = {"name": name, "ranks": ranks, "parameters": model.parameters, "mesh": found["mesh"]}
    row |= {"layout": found["layout"], "storage": sorted({*map(str, found["storage"].values())})}
    row |= {"microbatches": found["microbatches"], "predicted_seconds": found["predicted"]["step_seconds"]}
    with tempfile.TemporaryDirectory() as folder:
        each = on_ranks({name: (plan.torch, module, batch)}, Path(folder), ranks)[name]
        row |= {
            "loss": max(r.loss for r in each),
            "gradient": max(r.gradient for r in each),
            "worst": max(each, key=lambda r: r.gradient).worst,
            "held": [r.held for r in each],
            "planned": [r.planned for r in each],
            "misplaced": sorted({n for r in each for n in r.misplaced}),
        }
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = plan.torch, (module, batch, layers), port, ranks, rounds, folder
        torch.multiprocessing.start_processes(_rank, given, nprocs=ranks, start_method="fork")
        both = pickle.loads(Path(folder, "steps.pickle").read_bytes())
    for n, kind in enumerate(("", "cpu_")):
        ours = both[0][n]
        row[f"step_{kind}seconds"] = statistics.median(ours)
        for name, theirs in zip(("fsdp2", "layout"), (x[n] for x in both[1:]), strict=False):
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            to = "" if name == "fsdp2" else f"{name}_"
            row[f"{name}_{kind}seconds"] = statistics.median(theirs)
            row |= {f"{to}{kind}ratio": statistics.median(ratios)}
            row |= {f"{to}{kind}ratios": [round(r, 3) for r in ratios]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", default=str(HERE / "results" / "torch_steps.json"))
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    out = Path(args.out)
    old = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": []}
    rows, about = old["rows"], old.get("about", "")
    known = {(r["name"], r["ranks"]): r for r in rows}
    for ranks in args.ranks:
        for name in args.names or MODULES:
            try:
                row = one(name, ranks, args.rounds)
            except Exception as error:  # the next module is measured all the same
                row = {
                    "name": name,
                    "ranks": ranks,
                    "error": (str(error).strip() or repr(error)).splitlines()[-1],
                }
            known[name, ranks] = row
            print(json.dumps(row), flush=True)
            ordered = [known[n, r] for r in (4, 8) for n in MODULES if (n, r) in known]
            head = {"date": date.today().isoformat(), "hardware": HARDWARE, "framework": FRAMEWORK}
            head |= {"about": about}
            out.write_text(
                json.dumps({**head, "rounds": args.rounds, "rows": ordered}, indent=1) + "\n",
                encoding="utf-8",
            )


if __name__ == "__main__":
    main()
