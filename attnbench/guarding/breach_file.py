"""Save the tensors of a breach as safetensors that ``attnbench sweep --preset`` can measure every plan on."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import OutputError
from ..files.atomic import Draft
from ..problem.fp8 import Quantised
from .breach import Breach

__all__ = ["save_tensors"]

_CAPTURED = "attnbench.captured"
_LONGEST_NAME = 100


def save_tensors(folder: Path, breach: Breach, tensors: dict[str, Tensor | Quantised]) -> Path:
    """Write q, k, v (and grad_out) of the breaching call and return the file's path.  Raises OutputError.

    Names are ``0.q`` and so on, as ``attnbench capture`` has them; FP8 tensors have a ``0.q_descale`` beside them,
    which no sweep takes.  The metadata holds the breach as JSON.
    """
    spec = breach.spec if "grad_out" in tensors else breach.spec.replace(direction="forward")
    stored = {}
    for name, x in tensors.items():
        stored[f"0.{name}"] = _copy(x.data if isinstance(x, Quantised) else x)
        if isinstance(x, Quantised):
            stored[f"0.{name}_descale"] = _copy(x.descale)
    metadata = {"attnbench.breach": json.dumps(breach.to_dict())}
    if spec.descale is None:
        call = {"name": str(breach.plan)[:_LONGEST_NAME], "number": breach.call, "spec": spec.to_dict()}
        index = {"schema": "attnbench.captured/1", "torch": torch.__version__, "seen": breach.call + 1}
        metadata[_CAPTURED] = json.dumps({**index, "unrecorded": {}, "calls": [call]})
    slug = re.sub(r"[^a-z0-9]+", "-", f"{breach.plan} {breach.spec}".lower()).strip("-")[:150]
    path = folder / f"breach-{slug}-{secrets.token_hex(4)}.safetensors"  # each process writes its own
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}") from None
    with Draft(path) as draft, draft.by_name() as scratch:
        try:
            save_file(stored, scratch, metadata)
        except SafetensorError as error:  # safetensors raises this for a full disk
            raise OSError(None, str(error)) from error
    return path


def _copy(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x.detach())
