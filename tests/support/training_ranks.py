"""One rank that trains the small model, as torchrun starts it; says every step, and writes its losses."""

import faulthandler
import json
import sys
import time
from pathlib import Path

import torch
from patience import PATIENCE
from small_training import build_small, small

from attnbench.harness.training.history import History
from attnbench.harness.training.loop import Conduct, train
from attnbench.harness.training.parallel import joined

EVERY = 3  # steps between checkpoints


def main(folder: Path, settings: dict, pause: float) -> None:
    faulthandler.dump_traceback_later(PATIENCE / 2, exit=True)  # one that hangs says where, before it is ended
    torch.set_num_threads(1)
    with joined("cpu") as ranks:

        def told(history: History) -> None:
            if ranks.first:
                print(history.steps, flush=True)
            time.sleep(pause)

        trainable = build_small(small(**settings), ranks.device, dropout=ranks.world == 1)
        conduct = Conduct(folder / "checkpoints", EVERY)
        kept = []
        train(trainable, ranks, conduct, lambda history: (kept.append(history), told(history)), resume=True)
        if ranks.first:
            history = kept[-1]
            said = {"loss": history.loss, "grad_norm": history.grad_norm, "resumed_at": history.resumed_at}
            (folder / "found.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3]))
