"""The shell command that measures a row again, built only from checked numbers and names.

Text from a file (the name of a case, a family of captured tensors) never enters a command, because a user will paste
it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import yaml

from attnbench.choosing.budget import class_bound
from attnbench.errors import AttnbenchError
from attnbench.kernels.plan import Plan
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import Environment

from ...cases.case import SWEEP_DTYPES, case_name
from ...cases.inputs import DEFAULT_FAMILIES, FAMILIES
from ...cases.presets import PRESETS, preset_cases
from ...results.records import Measurement
from ...sequence_lengths import SequenceLengths
from ...training.config import OWN, TrainConfig
from ...training.judge.arms import Arm

__all__ = ["PLAN", "sweep_command", "train_command"]

PLAN = "PLAN"  # the place of a plan in the command of its case
_FILE = "case.yaml"
_ORDINARY = re.compile(r"[\w./:=@%+,>~ -]+", re.ASCII)
_EXPLICIT = ("model", "size", "steps", "seed", "attention")  # in places of their own


def sweep_command(rows: Sequence[Measurement]) -> tuple[str, str | None]:
    """(the command that measures a case again, with ``PLAN`` for the plan; what it cannot do, or None).

    ``rows`` have one spec.  If no command exists, as for captured tensors, the first is empty.
    """
    row = next((row for row in rows if row.measured), rows[0])
    spec, dtype = row.spec, "fp8" if row.spec.dtype == "bf16" else row.spec.dtype
    if dtype not in SWEEP_DTYPES or spec.return_lse or spec.descale is not None:
        return "", "No sweep asks this question."
    families = tuple(row.error) or DEFAULT_FAMILIES
    if not set(families) <= set(FAMILIES):
        return "", "Its errors were taken on captured tensors: sweep their file, --preset FILE.safetensors."
    options = [f"--dtype {dtype}"] if dtype != "fp8" else []
    if row.environment.device_type == "cpu":
        options.append("--device cpu")
    options += _bound(rows, spec)
    lengths = row.lengths
    preset = _preset(spec, lengths, dtype, row.environment, families)
    if preset is not None:
        chosen = f"attnbench sweep --preset {preset} --case {shlex.quote(case_name(spec, lengths))}"
    elif lengths is not None and lengths.unequal and (lengths.drawn is None or lengths.drawn.file is not None):
        return "", "Its sequences have the lengths of a program or a file, which its rows hold."
    else:
        entry = shlex.quote(_entry(spec, lengths, families))
        chosen = f"printf '%s\\n' {entry} > {_FILE} && attnbench sweep --preset {_FILE}"
    return " ".join([chosen, *options, f"--backends '{PLAN}'"]), None


def _bound(rows: Sequence[Measurement], spec: AttentionSpec) -> list[str]:
    """The budget of the FP8 plans, if it is not their default one."""
    bounds = {row.correctness.bound for row in rows if row.plan.fp8 and row.measured}
    usual = class_bound(Plan("any:fp8"), spec)
    return [f"--max-error {bound!r}" for bound in sorted(bounds - {usual})][:1]


def _preset(
    spec: AttentionSpec,
    lengths: SequenceLengths | None,
    dtype: str,
    environment: Environment,
    families: Sequence[str],
) -> str | None:
    for name, preset in PRESETS.items():
        cases = _cases(name, dtype, environment.device_type)
        if set(families) == set(preset.families) and (spec, lengths) in cases:
            return name
    return None


@lru_cache(maxsize=64)
def _cases(preset: str, dtype: str, device_type: str) -> frozenset[tuple[AttentionSpec, SequenceLengths | None]]:
    cases = preset_cases(preset, dtype, "cpu" if device_type == "cpu" else "cuda")
    return frozenset((case.spec, case.lengths) for case in cases)


def _entry(spec: AttentionSpec, lengths: SequenceLengths | None, families: Sequence[str]) -> str:
    """The case as the one entry of a YAML file, on one line."""
    entry: dict[str, Any] = {"batch": spec.batch, "heads": spec.heads, "seqlen_q": spec.seqlen_q}
    entry["head_dim"] = spec.head_dim
    usual = AttentionSpec.make(**entry, dtype=spec.dtype)
    for name in ("kv_heads", "seqlen_kv", "head_dim_v", "scale", "softcap", "direction"):
        if getattr(spec, name) != getattr(usual, name):
            entry[name] = getattr(spec, name)
    if lengths is not None and lengths.unequal:
        assert lengths.drawn is not None, "others have no command"
        drawn = lengths.drawn.model_dump(exclude_defaults=True)
        entry = {name: value for name, value in entry.items() if name not in ("batch", "seqlen_q", "seqlen_kv")}
        entry["lengths"] = {**drawn, "layout": lengths.layout}
    if spec.mask == Mask(right=0):
        entry["mask"] = "causal"
    elif spec.mask != Mask():
        entry["mask"] = {"left": spec.mask.left, "right": spec.mask.right, "alignment": spec.mask.alignment}
    if set(families) != set(DEFAULT_FAMILIES):
        entry["families"] = list(families)
    return "- " + yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=2**20).strip()


def train_command(arm: Arm, baseline: Arm | None) -> str:
    """The command that runs an arm again, with its baseline if it has one; empty if its settings are not valid.

    Values are attached to their options and quoted, and none may contain what a terminal acts on.
    """
    try:
        config = TrainConfig.from_dict(arm.first.settings)
        usual = TrainConfig.make(config.model, size=config.size, steps=config.steps).to_dict()
    except AttnbenchError:
        return ""
    arguments = [f"--model={config.model}", f"--size={config.size}", f"--steps={config.steps}"]
    for name, value in config.to_dict().items():
        if name in _EXPLICIT or value == usual.get(name) or value is None:
            continue
        arguments.append(f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}")
    if config.attention != OWN:
        arguments.append(f"--attention={config.attention}")
    if baseline is not None:
        rival = baseline.first.settings
        arguments.append(f"--compare={rival['attention']}")
        if rival.get("linears") != config.linears:
            arguments.append(f"--compare-linears={rival.get('linears')}")
    arguments += [f"--seeds={len(arm.runs)}", f"--seed={config.seed}"]
    if arm.first.environment.device_type == "cpu":
        arguments.append("--device=cpu")
    if not all(_ORDINARY.fullmatch(word) for word in arguments):
        return ""
    command = " ".join(["attnbench train", *(shlex.quote(word) for word in arguments)])
    world = arm.first.world
    return command if world == 1 else f"torchrun --nproc-per-node {world} -m {command} --out training"
