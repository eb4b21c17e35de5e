"""Ranks that share sequences; forked from one process that has already loaded torch.

Each rank writes results by name: the relative errors of out, lse and gradients at its positions, or an error message.
"""

import faulthandler
import json
import os
import sys
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import ranks
import torch
import torch._dynamo  # once for all ranks
import torch.distributed as dist
from dense import dense_attention, dense_gradients, relative_l2
from patience import PATIENCE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from attnbench import AttentionSpec, attention, explain
from attnbench.dispatch.ring_exchange import Group
from attnbench.errors import AttnbenchError
from attnbench.integrations.context_parallel import context_parallel, shard
from attnbench.integrations.context_parallel import explain as explain_parts
from attnbench.integrations.sdpa import replaced
from attnbench.problem.mask import Mask

S, D = 64, 32
CPU = torch.device("cpu")
TENSORS = ("out", "lse", "dq", "dk", "dv")
PLANS = {
    "fp32": "sdpa-flash:fp32", "bf16": "sdpa-flash:bf16", "e4m3": "emulated:fp8",
    "mixed": "emulated:fp8>sdpa-flash:bf16",
}  # fmt: skip


def draw(dtype):
    """q, k, v and dO of two whole sequences, with heads in groups of two."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, S, D, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]


def errors(mesh, plan, causal=True, layout="bhsd"):
    """Errors at this rank's positions against exact attention of the whole, and the dtype of the sent tensors."""
    whole = draw(torch.float32 if plan.endswith("fp32") else torch.bfloat16)
    q, k, v, grad_out = (shard(mesh, x, 2) for x in whole)
    q, k, v, grad_out = (x.transpose(1, 2) if layout == "bshd" else x for x in (q, k, v, grad_out))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    asked = {"is_causal": causal, "backend": plan, "layout": layout}
    with context_parallel(mesh) as shared:
        out, lse = attention(*leaves, **asked, return_lse=True)
        found = [out, lse, *torch.autograd.grad(out, leaves, grad_out)]
        quiet = attention(*(x.detach() for x in leaves), **asked)
    assert torch.equal(quiet, out), "the result differs without gradients"
    (sent,) = shared.sent
    if layout == "bshd":
        found = [x.transpose(1, 2) if x.ndim == 4 else x for x in found]
    spec = AttentionSpec.make(
        batch=2, heads=4, kv_heads=2, seqlen_q=S, head_dim=D, dtype="fp32", mask=Mask(right=0 if causal else None)
    )
    truth = [*dense_attention(*whole[:3], spec), *dense_gradients(*whole, spec)]
    pairs = zip(TENSORS, found, (shard(mesh, x, 2) for x in truth), strict=True)
    return {name: relative_l2(one, other) for name, one, other in pairs} | {"sent": sent}


def message_of(act):
    """The message of the AttnbenchError that ``act`` raises, or \"nothing\"."""
    try:
        act()
    except AttnbenchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def attend(mesh, length=8, **asked):
    x = torch.randn(1, 2, length, 16)
    with context_parallel(mesh):
        return attention(x, x, x, **asked)


def mismatched_lengths_after_agreement(mesh, rank):
    """The error of ranks that agreed on two lengths before and now use different ones."""
    for length in (8, 12):
        attend(mesh, length)
    with mock.patch.dict(os.environ, {"ATTNBENCH_CHECK": "1"}):
        attend(mesh, 8)
        return message_of(lambda: attend(mesh, 12 if rank else 8))


def buffers(mesh):
    """Tokens are sharded in the block and whole after it; errors for invalid buffers."""
    tokens, lost = torch.arange(16)[None].clone(), torch.arange(16).clone()
    given = {"buffers": [tokens, lost], "buffer_seq_dims": [1, 0], "no_restore_buffers": {lost}}
    with context_parallel(mesh, **given):
        inside = tokens[0].tolist()
    wrong = {
        "a view": {"buffers": [torch.zeros(16, 2)[:, 0]], "buffer_seq_dims": [0]},
        "a parameter": {"buffers": [torch.zeros(16, requires_grad=True)], "buffer_seq_dims": [0]},
        "no dimension": {"buffers": [torch.zeros(16)], "buffer_seq_dims": [1]},
        "no length": {"buffers": [torch.zeros(15)], "buffer_seq_dims": [0]},
        "no name": {"buffers": [torch.zeros(16)]},
        "a stranger": {"no_restore_buffers": {torch.zeros(16)}},
    }
    messages = {
        what: message_of(lambda each=each: context_parallel(mesh, **each).__enter__()) for what, each in wrong.items()
    }
    return {"inside": inside, "after": tokens[0].tolist(), "lost": lost.tolist(), "wrong": messages}


def fsdp_checkpoint_error(mesh, compiled):
    """The largest gradient error over the parameters of an FSDP2 model with checkpointed layers."""
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    truth = ranks.gradients(ranks.model("sdpa-flash:fp32"), x)
    net = ranks.model("sdpa-flash:fp32")
    for layer in net:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if compiled:
        net.compile(backend="aot_eager")
    with context_parallel(mesh):
        found = ranks.gradients(net, shard(mesh, x, 1))
    return max(relative_l2(each.full_tensor(), truth[name]) for name, each in found.items())


def sdpa_error(mesh):
    """The relative error of calls of torch's SDPA."""
    whole = draw(torch.float32)[:3]
    with torch.no_grad(), context_parallel(mesh), replaced(backend="sdpa-flash") as calls:
        q, k, v = (shard(mesh, x, 2) for x in whole)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    truth = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    return {"error": relative_l2(out, shard(mesh, truth, 2)), "served": calls.served}


def llama_error(mesh):
    """The relative error of a model of transformers, whose tokens and positions the ranks share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from attnbench.integrations.transformers import register

    register(backend="sdpa-flash:fp32")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="attnbench")
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, 16)
    truth = model(tokens, position_ids=positions).logits
    with context_parallel(mesh):
        own = [shard(mesh, x, 1) for x in (tokens, positions)]
        found = model(own[0], position_ids=own[1], attention_mask=torch.ones_like(own[0])).logits
        # Without a mask a jump in positions begins a sequence; the last rank's have no jump.
        split = (
            message_of(lambda: model(own[0], position_ids=own[1], use_cache=False)) if mesh.get_rank() == 0 else None
        )
    return {"error": relative_l2(found, shard(mesh, truth, 1)), "split": split}


def losses(rank, size, folder):
    """Losses of a training run whose samples the ranks share, and of the same run on one rank."""
    from attnbench.harness.training.config import TrainConfig
    from attnbench.harness.training.run.loop import LoopOptions, train
    from attnbench.harness.training.run.parallel import Ranks
    from attnbench.harness.training.run.trainable import build

    spread = {"parallel": "fsdp2", "checkpointing": True, "context_parallel": size}
    found = {}
    for name, settings, place in (("alone", {}, Ranks(CPU)), ("shared", spread, Ranks(CPU, rank, size))):
        config = TrainConfig.make(seqlen=16, batch=2, steps=2, attention="auto", policy="fp32", **settings)
        kept = []
        train(build(config, CPU), place, LoopOptions(folder, 0), kept.append)
        found[name] = kept[-1].loss
    return found


def torch_ring_message(mesh):
    """The error of torch's ring attention, which training with sdpa uses, on a CPU."""
    from attnbench.harness.training.config import TrainConfig
    from attnbench.harness.training.run.parallel import shared_attention

    config = TrainConfig.make(seqlen=16, attention="sdpa", parallel="ddp", context_parallel=mesh.size())
    q, k, v = (torch.zeros(1, 2, 4, 16) for _ in "qkv")
    try:
        with shared_attention(config, mesh):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return "nothing"


def check(mesh, rank, size, folder, thorough):
    """Yields (name, result)."""
    for name, plan in PLANS.items():
        yield name, errors(mesh, plan)
        if thorough or name == "e4m3":
            yield f"{name} whole", errors(mesh, plan, causal=False)
    yield "rows first", errors(mesh, PLANS["fp32"], causal=False, layout="bshd")
    yield "unequal lengths", message_of(lambda: attend(mesh, length=10 if rank else 8))
    yield "late", mismatched_lengths_after_agreement(mesh, rank)
    yield "another plan", message_of(lambda: attend(mesh, backend="reference" if rank else "sdpa-flash"))
    yield "one refuses", message_of(lambda: attend(mesh, backend="fa3" if rank else "sdpa-flash"))
    yield "window", message_of(lambda: attend(mesh, window=(2, 0)))
    yield "odd", message_of(lambda: attend(mesh, length=9, is_causal=True))
    with context_parallel(mesh):
        x = torch.randn(1, 2, 8, 16)
        yield "explain", message_of(lambda: explain(x, x, x))
        yield "choices", {part: str(each.plan) for part, each in explain_parts(x, x, x, is_causal=True).items()}
    yield "buffers", buffers(mesh)
    yield "through sdpa", sdpa_error(mesh)
    yield "composed", fsdp_checkpoint_error(mesh, False)
    if thorough and os.environ.get("TRITON_INTERPRET") == "1":  # without it no kernel of ours runs on a CPU
        yield "rotated", errors(mesh, "triton:fp8>triton:fp8")
    if thorough:
        yield "losses", losses(rank, size, folder)
        yield "llama", llama_error(mesh)
        yield "torch's ring", torch_ring_message(mesh)
        yield "composed, compiled", fsdp_checkpoint_error(mesh, True)
    alone = dist.new_group([size - 1])
    if rank == size - 1:
        yield "alone", single_rank_error(alone)
    else:
        yield "outside", message_of(lambda: Group(alone))
    dist.barrier()
    if rank == size - 1:
        os._exit(0)  # as a crash would
    if rank == 0:
        yield "crashed", [message_of(partial(attend, mesh, length)) for length in (8, 16)]  # agreed on, and new


def single_rank_error(group):
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    with context_parallel(group):
        shared = attention(x, x, x, is_causal=True)
        mine = torch.autograd.grad(shared.sum(), x)[0]
    out = attention(x, x, x, is_causal=True)
    return max(relative_l2(shared, out), relative_l2(mine, torch.autograd.grad(out.sum(), x)[0]))


def main(rank, size, folder, thorough):
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE / 2))
    mesh, found = init_device_mesh("cpu", (size,)), {}
    for name, each in check(mesh, rank, size, folder, thorough):
        found[name] = each
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    children = []
    for rank in range(size):
        if not (pid := os.fork()):
            try:
                main(rank, size, folder, len(sys.argv) > 3)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in children]
    sys.exit(any(ended))
