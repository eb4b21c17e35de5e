"""A row of facts refuses what it does not serve, and looks at all that a spec can ask."""

from dataclasses import fields

from attnbench import AttentionSpec
from attnbench.kernels.capabilities import Capabilities, Device

GPU = Device("cuda", "A GPU", (9, 0))


def test_a_row_reads_every_field_of_a_spec():
    """A field that no row reads would be served, and left out, by every kernel that does not know of it."""
    read = set()

    class Watched(AttentionSpec):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    spec = Watched.make(batch=1, heads=4, kv_heads=2, seqlen_q=8, seqlen_kv=16, head_dim=16, softcap=1.0)
    read.clear()
    Capabilities(dtypes=("bf16",)).refusals(spec, GPU)
    unread = {each.name for each in fields(AttentionSpec)} - read
    assert unread == {"scale"}, "any number is served; what a kernel cannot scale by it refuses in further_refusals"
