"""How much there is of queries and keys: of one length for all, or of sequences with lengths of their own."""

from __future__ import annotations

from typing import NamedTuple

from ..tile_map import capacity

__all__ = ["Extent"]


class Extent(NamedTuple):
    """Of Q and K in memory; how many ``sequences`` have lengths of their own, None where all are alike."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    sequences: int | None

    def tiles(self, block: int) -> int:
        """Of queries of a head, of all batch entries, at most."""
        if self.sequences is None:
            return self.batch * -(-self.seqlen_q // block)
        return capacity(self.sequences, self.batch, self.seqlen_q, block)
