"""Shapes that nobody chose: attention layers of published models, drawn at random with batch, length and direction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from random import Random
from typing import Any, get_args

import yaml

from attnbench.errors import InputError
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec, Direction

from ..sequence_lengths import Draw, SequenceLengths
from .case import Case
from .drawn_lengths import draw_lengths

__all__ = ["ModelAttention", "drawn_cases", "model_layers", "published_models"]

_LENGTHS = (128, 131072)
_MOST_TOKENS = 131072  # batch x queries; more only repeats what a GPU does
# Of a forward pass: about 0.03 s on an H200, whose exact results in FP64 take 100 times as long; less on a laptop.
_MOST_FLOPS = {"cuda": 2e13, "cpu": 2e9}
_TENSOR_PARALLEL = (1, 2, 4, 8)
_PACKED = 0.2  # of the causal layers: documents to train on, prompts to prefill
_DOCUMENTS = 4  # documents whose mean is this part of the length, which the longest of them have
_TRIES = 1000
_TOKENS, _LONGEST = {"cuda": 16384, "cpu": 256}, {"cuda": 8192, "cpu": 256}  # of a case of the preset


@dataclass(frozen=True)
class ModelAttention:
    """The attention layers of one published model.

    ``source`` is its repository on huggingface.co; ``seen`` are the files of GitHub repositories (owner/name:path) and
    the pages (https://...) where its numbers were read.  ``lengths`` are its shortest and its longest sequence.
    """

    name: str
    source: str
    seen: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    masks: tuple[Mask, ...]
    softcap: float = 0.0
    lengths: tuple[int, int] = _LENGTHS

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> ModelAttention:
        """From an entry of models.yaml, its defaults filled in."""
        given = {"kv_heads": entry["heads"], "head_dim_v": entry["head_dim"], "lengths": _LENGTHS, **entry}
        masks = tuple(_mask(each) for each in given.pop("masks"))
        seen, lengths = tuple(given.pop("seen")), tuple(given.pop("lengths"))
        return cls(seen=seen, masks=masks, lengths=lengths, **given)

    def draw(self, random: Random) -> AttentionSpec:
        """One of its layers in a direction, on one of 1 to 8 GPUs, with a batch and a length, both log-uniform."""
        shares = [each for each in _TENSOR_PARALLEL if self.kv_heads % each == 0 and self.heads % each == 0]
        share = random.choice(shares)
        length = _log_uniform(random, *self.lengths)
        rounded = length - length % 128
        if rounded >= max(256, self.lengths[0]) and random.random() < 0.5:
            length = rounded  # as often as not somebody chose the length for its roundness
        return AttentionSpec.make(
            batch=_log_uniform(random, 1, max(1, min(64, _MOST_TOKENS // length))),
            heads=self.heads // share,
            kv_heads=self.kv_heads // share,
            seqlen_q=length,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            mask=random.choice(self.masks),
            softcap=self.softcap,
            direction=random.choice(("forward", "training")),
        )


def model_layers(device_type: str) -> dict[AttentionSpec, list[str]]:
    """Every distinct layer of the published models, forward and in training, in bf16, with the models that have it.

    On a GPU (cuda) of 16,384 tokens, in sequences of 8,192 or the longest that the model is used with; on a CPU (cpu)
    of 256 tokens, with the query heads of one key head.
    """
    found: dict[AttentionSpec, list[str]] = {}
    for model, direction in product(published_models(), get_args(Direction)):
        length = min(model.lengths[1], _LONGEST[device_type])
        share = 1 if device_type == "cuda" else model.kv_heads
        for mask in model.masks:
            spec = AttentionSpec.make(
                batch=max(1, _TOKENS[device_type] // length),
                heads=model.heads // share,
                kv_heads=model.kv_heads // share,
                seqlen_q=length,
                head_dim=model.head_dim,
                head_dim_v=model.head_dim_v,
                mask=mask,
                softcap=model.softcap,
                direction=direction,
            )
            found.setdefault(spec, []).append(model.name)
    return found


@cache
def published_models() -> tuple[ModelAttention, ...]:
    """All models of models.yaml."""
    text = files(__package__).joinpath("models.yaml").read_text(encoding="utf-8")
    return tuple(ModelAttention.of(entry) for entry in yaml.safe_load(text))


def drawn_cases(count: int, seed: int, device_type: str, packed: bool = False) -> list[Case]:
    """``count`` different shapes of bf16 tensors; the first ones are the same whatever the count.

    With ``packed``, a fifth of the causal ones becomes as many tokens of packed sequences.  Shapes of more operations
    in the forward pass than the type of device (cuda, cpu) does at once are drawn again.  Raises InputError for a count
    that is not positive, or where too few different shapes are found.
    """
    if count < 1:
        raise InputError(f"expected a positive number of shapes, not {count}")
    random, found = Random(f"published models {seed}"), dict[AttentionSpec, str]()
    for _ in range(_TRIES * count):
        model = random.choice(published_models())
        spec = model.draw(random)
        if spec.replace(direction="forward").flops <= _MOST_FLOPS[device_type]:
            found.setdefault(spec, model.name)
        if len(found) == count:
            cases = [Case(f"{name}: {spec}", spec) for spec, name in found.items()]
            return _some_packed(cases, seed) if packed else cases
    raise InputError(f"only {len(found)} different shapes were drawn, of {count}")


def _some_packed(cases: list[Case], seed: int) -> list[Case]:
    """The cases, some of the causal ones packed; each is as likely whatever the others are."""
    random, found = Random(f"packed sequences {seed}"), dict[AttentionSpec, Case]()
    for case in cases:
        spec, chosen = case.spec, random.random() < _PACKED
        mean = spec.seqlen_q / _DOCUMENTS
        if chosen and spec.mask.right == 0 and mean >= 1:
            total = spec.batch * spec.seqlen_q
            draw = Draw(distribution="lognormal", total=total, longest=spec.seqlen_q, mean=mean, seed=seed)
            lengths = SequenceLengths(layout="packed", q=draw_lengths(draw), drawn=draw)
            spec = spec.replace(**lengths.sizes())
            case = Case(f"{case.name.partition(': ')[0]}: {spec}, {lengths}", spec, case.families, lengths)
        found.setdefault(spec, case)
    return list(found.values())


def _mask(given: str | Mapping[str, int]) -> Mask:
    if isinstance(given, str):
        return {"none": Mask(), "causal": Mask(right=0)}[given]
    if "window" in given:
        return Mask(left=given["window"] - 1, right=0)
    return Mask(left=given["around"], right=given["around"])


def _log_uniform(random: Random, low: int, high: int) -> int:
    return round(math.exp(random.uniform(math.log(low), math.log(high))))
