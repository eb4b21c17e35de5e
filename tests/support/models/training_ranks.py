"""One rank that trains the small model, started by torchrun; prints every step and writes its losses."""

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
from patience import PATIENCE
from small_training import build_small, small

from attnbench.harness.training.run.history import History
from attnbench.harness.training.run.loop import LoopOptions, train
from attnbench.harness.training.run.parallel import Ranks, join_ranks

EVERY = 3  # steps between checkpoints


def main(folder: Path, settings: dict, pause: float) -> None:
    faulthandler.dump_traceback_later(PATIENCE / 2, exit=True)  # a rank that hangs prints its stack
    torch.set_num_threads(1)
    with join_ranks("cpu") as ranks:
        # In a function, whose model is gone when the group ends: a reducer of DDP that holds the group last waits for
        # gloo's threads with the interpreter's lock, for which they may wait (pytorch issue 56297).
        _train(ranks, folder, settings, pause)


def _train(ranks: Ranks, folder: Path, settings: dict, pause: float) -> None:
    def report_step(history: History) -> None:
        if ranks.first:
            print(history.steps, flush=True)
        time.sleep(pause)

    trainable = build_small(small(**settings), ranks.device, dropout=ranks.world == 1)
    conduct = LoopOptions(folder / "checkpoints", EVERY)
    kept = []
    train(trainable, ranks, conduct, lambda history: (kept.append(history), report_step(history)), resume=True)
    if ranks.first:
        history = kept[-1]
        state = {"loss": history.loss, "grad_norm": history.grad_norm, "resumed_at": history.resumed_at}
        (folder / "found.json").write_text(json.dumps(state))


def run_forked_ranks(folder: Path, settings: dict, world: int) -> None:
    """Runs ranks forked from this process, which has loaded torch; exits with 1 if one of them fails."""
    ranks = []
    for rank in range(world):
        if not (pid := os.fork()):
            os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
            try:
                main(folder, settings, 0.0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        ranks.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in ranks]
    sys.exit(any(ended))


if __name__ == "__main__":
    if len(sys.argv) > 4:
        run_forked_ranks(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[4]))
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3]))
