"""Build what a loop trains from a config: module, loss, data, and the parts that others measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from attnbench.dispatch.ring_parts import places
from attnbench.errors import InputError

from ..config import TrainConfig
from ..data.corpus import Corpus, load, samples_of
from ..data.documents import packed, padded
from ..data.images import random_images
from ..models.attention import Attend, Attending, AttentionCore
from ..models.blocks import checkpoint_blocks, compile_blocks
from ..models.flops import gpt_attention_flops, gpt_flops, vit_flops
from ..models.gpt import Gpt, gpt_size, initialise
from ..models.huggingface import make_hf
from ..models.linears import convert_linears, linears_context, refusal
from ..models.vit import make_vit
from ..models.vit_sizes import VIT_SIZES
from ..models.vit_te import te_block
from .policy import cast_weights, policy_context

__all__ = ["Batch", "Trainable", "build"]

Batch = tuple[Tensor, ...]


@dataclass
class Trainable:
    """A model ready to train.  ``module(*batch)`` is its fp32 loss; a loop may replace it by a wrapped one.

    A batch is inputs and targets; of packed documents also their positions and where they start (data/documents.py).

    ``blocks`` are the units to shard, ``attention_modules`` each layer's attention, called with q (B, H, S, D), k, v
    and ``is_causal`` (none with TransformerEngine's block).  ``flops_per_step`` (see models/flops.py; for documents in
    the mean) and ``units_per_step``, tokens without padding or images, are those of one rank.
    """

    config: TrainConfig
    device: torch.device
    module: nn.Module
    blocks: Sequence[nn.Module]
    attention_modules: Sequence[AttentionCore]
    flops_per_step: float
    units: Literal["tokens", "images"]
    units_per_step: int
    parameters: int
    corpus: Corpus | None

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a batch, an fp32 scalar, computed under the config's policy and linears."""
        with policy_context(self.config, self.device), linears_context(self.config.linears):
            loss: Tensor = self.module(*batch)
        return loss

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """The batch of a rank at a step (from 0 on), on the device: the same for equal seeds and data.

        Consecutive ranks share samples if the config says so; each then has its places of them, and their positions.
        """
        config, sharing = self.config, self.config.context_parallel
        numbers = samples_of(step, config.batch, rank // sharing, world // sharing)
        if self.corpus is None:
            size = VIT_SIZES[config.size]
            return random_images(config.seed, numbers, size.pixels, size.classes, self.device)
        if config.packing != "none":
            number = samples_of(step, 1, rank, world).start
            documents = self.corpus.documents.draw(config.seed, number, config.batch * config.seqlen)
            batch = packed(documents) if config.packing == "packed" else padded(documents, config.seqlen)
            return tuple(each.to(self.device) for each in batch)
        samples = [self.corpus.sample(config.seed, number) for number in numbers]
        tokens = torch.stack(samples).to(self.device)
        tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if sharing == 1:
            return tokens, targets
        own = places(config.seqlen, sharing, rank % sharing, self.device)
        return tokens[:, own], targets[:, own], own[None]


def build(config: TrainConfig, device: torch.device | str, *, attend: Attending | None = None) -> Trainable:
    """The config's model on the device, its weights drawn from the seed alone.

    ``attend`` replaces the config's attention.  Checkpointing and compilation are applied before anything is sharded.
    Raises InputError on a device or package that cannot serve the config, with the command that installs what is
    missing.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if attend is not None and config.block == "te":
        raise InputError("block=te has an attention of its own, and takes no other")
    if reason := refusal(config.linears, device):
        raise InputError(reason)
    corpus = load(config.data, config.seqlen) if config.learns_text else None  # fails sooner than the model
    made = _build(config, device, corpus, attend)
    made.parameters = sum(each.numel() for each in made.module.parameters())
    cast_weights(made.module, config)
    if config.block == "plain":
        tokens = config.places if config.packing == "padded" else config.batch * config.places
        convert_linears(made.blocks, config.linears, tokens)
    te = config.checkpointing and (config.linears == "te-fp8" or config.block == "te")
    if config.compile and te:
        compile_blocks(made.blocks, within=True)
    if config.checkpointing:
        checkpoint_blocks(made.blocks, te=te, offload=config.offload)
    if config.compile and not te:
        compile_blocks(made.blocks)
    return made


def _build(config: TrainConfig, device: torch.device, corpus: Corpus | None, attend: Attending | None) -> Trainable:
    cores: list[AttentionCore] = []
    core = _maker(config, attend, cores)
    tokens = config.batch * config.places
    if config.model == "gpt":
        size = gpt_size(config)
        with torch.device("meta"):
            gpt = Gpt(size, core)
        gpt = gpt.to_empty(device=device)
        initialise(gpt, config.seed)
        linear = gpt_flops(size, 1, config.seqlen) - gpt_attention_flops(size, 1, config.seqlen)
        flops = _text_flops(config, corpus, linear, partial(gpt_attention_flops, size, 1)) / config.context_parallel
        return Trainable(config, device, gpt, list(gpt.blocks), cores, flops, "tokens", tokens, 0, corpus)
    if config.model == "vit-huge":
        shape = VIT_SIZES[config.size]
        own = config.block == "te"
        options = {"block_fn": te_block(device)} if own else {}
        vit = make_vit(shape, device, config.seed, None if own else core, **options)
        flops = vit_flops(shape, config.batch)
        return Trainable(config, device, vit, vit.blocks, cores, flops, "images", config.batch, 0, None)
    hf = make_hf(config.model.removeprefix("hf:"), config.seqlen, device, config.seed, core, config.packing)
    flops = _text_flops(config, corpus, hf.linear_flops, hf.attention_flops)
    return Trainable(config, device, hf, hf.blocks, hf.cores, flops, "tokens", tokens, 0, corpus)


def _text_flops(config: TrainConfig, corpus: Corpus | None, linear: float, attention: Callable[[int], float]) -> float:
    """A step's operations: ``linear`` of a sample's tokens, ``attention`` of a sample or document of a length."""
    assert corpus is not None, "text is learnt from a corpus"
    if config.packing == "none":
        return config.batch * (linear + attention(config.seqlen))
    return config.batch * (linear + config.seqlen * corpus.documents.mean(attention))


def _maker(config: TrainConfig, attend: Attending | None, made: list[AttentionCore]) -> Callable[[], AttentionCore]:
    """A function that makes an attention core and adds it to ``made``."""

    def core() -> AttentionCore:
        made.append(AttentionCore(attend or Attend(config)))
        return made[-1]

    return core
