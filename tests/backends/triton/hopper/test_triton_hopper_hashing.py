"""A kernel has one hash, by which compiled code is found on the disk, whatever the process ran before."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", minversion="3.6")

HASH = """
import json, sys
from attnbench.backends.triton.backward import copies, keys, layout, queries, sums
from attnbench.backends.triton.backward.hopper import fused, narrow_keys
from attnbench.backends.triton.launching import Launch
from triton.runtime.jit import JITFunction

kernels = [fused.all_gradients_hopper, narrow_keys.narrow_key_gradients_hopper]
kernels += [each for module in (copies, keys, layout, queries, sums)
            for each in vars(module).values() if isinstance(each, JITFunction)]
found = {}
for kernel in kernels[::int(sys.argv[1])]:
    Launch(kernel, (1, 1, 1), (), {})  # which starts nothing yet
    found[kernel.__module__ + kernel.__name__] = kernel.cache_key
print(json.dumps(found))
"""


def test_the_order_of_kernels_changes_no_hash() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = [
        subprocess.Popen([sys.executable, "-c", HASH, step], stdout=subprocess.PIPE, text=True, env=environment)
        for step in ("1", "-1")
    ]
    forwards, backwards = (json.loads(each.communicate()[0]) for each in asked)
    assert len(forwards) > 10
    assert forwards == backwards
