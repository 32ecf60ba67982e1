"""What becomes of two workers when something happens to one of them: every fault in every phase of training.

    python benchmarks/faults.py --out docs/results

Each case is two processes with a store of their own, without a launcher, which would end the other one itself. Rank 1
meets the fault. Told are the seconds from then until both have ended, and what rank 0 said last. Then one run under
``torchrun --max-restarts`` meets many of these faults one after the other, and must end with the bits of a run without.
Writes ``faults.md``.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.launch import GNN, environment
from harness.report import processor, write
from safetensors.torch import save_file
from tqdm import tqdm

import pyg_sar
from pyg_sar import checkpoint
from pyg_sar.data.datasets import dataset

PHASES = {
    "join": "before the workers meet",
    "load": "before the graph is loaded",
    "forward": "in a layer's forward pass",
    "backward": "in a layer's backward pass",
    "gradients": "before gradients are summed",
    "step": "between two steps",
    "accuracy": "before accuracy is counted",
    "gather": "before rows are gathered",
    "save": "while a checkpoint is written",
    "leave": "after the last step",
}
FAULTS = {
    "raise": "an exception",
    "interrupt": "Ctrl-C",
    "exit 3": "`sys.exit(3)`",
    "exit 0": "`sys.exit(0)`",
    "vanish": "`os._exit(0)`",
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "other code": "other code",
}
TIMEOUT = 8  # seconds, of the group
MARK = "STRUCK "
WORKER = [__file__, "--worker"]
KINDS = {
    "other code": r"different code|This worker runs|started as one of",
    "ended": r"rank 1 ended",
    "told": r"Could not write",
    "stopped answering": r"stopped answering|did not come",
}


class Outcome(NamedTuple):
    """What became of a case."""

    seconds: float  # from the fault until both ended
    codes: tuple[int, int]
    said: str  # the last line of rank 0

    @property
    def kind(self) -> str:
        if self.codes[0] == 0:
            return "finished"
        return next((kind for kind, pattern in KINDS.items() if re.search(pattern, self.said)), "raw")


def strike(fault: str) -> None:
    """Meet a fault."""
    print(f"{MARK}{time.time()}", flush=True)
    if fault == "raise":
        raise ValueError("boom")
    if fault == "interrupt":
        raise KeyboardInterrupt
    if fault.startswith("exit"):
        sys.exit(int(fault[-1]))
    if fault == "vanish":
        os._exit(0)
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "other code":
        if dist.is_initialized():
            pyg_sar.all_reduce(torch.ones(3))
        else:
            os.environ["WORLD_SIZE"] = "3"


def worker(folder: str, name: str, device: str, epochs: int, faults: list[tuple[str, str]]) -> None:
    """Train from the newest checkpoint, and meet the fault of this attempt on rank 1, in the second epoch."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    phase, fault = faults[attempt] if attempt < len(faults) else ("", "")

    def at(here: str, now: bool = True) -> None:
        if here == phase and now and os.environ["RANK"] == "1":
            strike(fault)

    at("join")
    with pyg_sar.process_group("gloo", timeout=TIMEOUT) as rank:
        at("load")
        torch.manual_seed(0)
        data = pyg_sar.load(f"{folder}/graph", device)
        model = GNN(pyg_sar.nn, "gat", data.x.size(1), 8, data.num_classes, attention_dropout=0.2).to(device)
        pyg_sar.broadcast_parameters(model)
        torch.manual_seed(rank)
        optimizer = torch.optim.Adam(model.parameters())
        saves = pyg_sar.Checkpoints(f"{folder}/{name}", model=model, optimizer=optimizer, data=data)
        first = 1 + saves.restore()
        write = checkpoint.values.write
        for epoch in range(first, epochs + 1):
            now = epoch == first + 1
            optimizer.zero_grad()
            hooks = [model.convs[1].register_forward_pre_hook(lambda *_, now=now: at("forward", now))]
            hooks.append(model.convs[1].register_full_backward_hook(lambda *_, now=now: at("backward", now)))
            out = model(data.x, data.edge_index)
            mask = data.train_mask
            pyg_sar.global_mean(F.cross_entropy(out[mask], data.y[mask], reduction="none")).backward()
            at("gradients", now)
            pyg_sar.sum_gradients(model)
            optimizer.step()
            for hook in hooks:
                hook.remove()
            at("accuracy", now)
            pyg_sar.accuracy(out.argmax(-1), data.y, data.val_mask)
            at("gather", now)
            pyg_sar.gather(out, data.n_id)
            checkpoint.values.write = lambda *args, now=now: (at("save", now), write(*args))
            saves.step(epoch)
            at("step", epoch == first)
        at("leave")
        if rank == 0:
            save_file({k: v.contiguous() for k, v in model.state_dict().items()}, f"{folder}/{name}.safetensors")


def run(folder: str, phase: str, fault: str, device: str = "cpu") -> Outcome:
    """Return what becomes of two workers, perhaps on one GPU."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    workers: list[Any] = []
    for rank in range(2):
        env = environment(1, **address, RANK=str(rank), WORLD_SIZE="2")
        command = [*WORKER, folder, f"saves-{phase}-{fault}", device, "2", f"{phase}/{fault}"]
        workers.append(
            subprocess.Popen(
                [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        _, errors = workers[0].communicate(timeout=90)
        if fault == "stop":
            workers[1].kill()
        told, other = workers[1].communicate(timeout=90)
        ended = time.time()
    finally:
        for it in workers:
            it.kill()
    struck = re.search(rf"{MARK}([\d.]+)", told)
    if struck is None:
        raise RuntimeError(f"rank 1 met no fault:\n{told}{other}")
    said = [line for line in errors.strip().splitlines() if line.strip()] or [""]
    return Outcome(ended - float(struck[1]), (workers[0].returncode, workers[1].returncode), said[-1])


def recover(folder: str, faults: list[tuple[str, str]]) -> bool:
    """Whether a run under ``torchrun`` that meets one fault after the other ends with the bits of a run without."""
    weights = []
    for name, its in (("whole", []), ("resumed", faults)):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={len(its)}"]
        command = [*torchrun, *WORKER, folder, name, "cpu", str(len(faults) + 2), *map("/".join, its)]
        subprocess.run([sys.executable, *command], env=environment(1), check=True, capture_output=True, timeout=1800)
        weights.append(Path(f"{folder}/{name}.safetensors").read_bytes())
    return weights[0] == weights[1]


def recoverable(some: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return a kill in every phase, every fault in a forward pass, and some of both at random."""
    faults = [fault for fault in FAULTS if fault != "other code"]
    phases = [phase for phase in PHASES if phase != "leave"]
    rng = random.Random(seed)
    found = [(phase, "kill") for phase in phases] + [("forward", fault) for fault in faults if fault != "kill"]
    return [*found, *((rng.choice(phases), rng.choice(faults)) for _ in range(some))]


def cases() -> list[tuple[str, str]]:
    return [(phase, fault) for phase in PHASES for fault in FAULTS]


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        with ThreadPoolExecutor(args.jobs) as pool:
            found = list(tqdm(pool.map(lambda case: run(folder, *case), cases()), total=len(cases())))
        restarts = recoverable(args.random)
        equal = recover(folder, restarts)
    by = dict(zip(cases(), found, strict=True))
    raw = sum(outcome.kind == "raw" for outcome in found)
    lines = [
        f"Seconds from a fault of rank 1 until both workers had ended, and what rank 0 says of it: that rank 1 "
        f"*ended*, with its error, step, layer and line; that it *stopped answering*; that the workers ran *other "
        f"code*; *told*: the same error on both. {len(found)} cases; raw texts of libraries: {raw}. "
        f"Timeout {TIMEOUT} s. {processor()}, torch {torch.__version__}. Made by `benchmarks/faults.py`.",
        "",
        f"| | {' | '.join(FAULTS.values())} |",
        "|---" * (len(FAULTS) + 1) + "|",
    ]
    for phase, words in PHASES.items():
        cells = [f"{by[phase, fault].seconds:.0f} {by[phase, fault].kind}" for fault in FAULTS]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    lines += ["", "Some of what rank 0 said:", "", "```text"]
    for case in (("forward", "raise"), ("backward", "kill"), ("accuracy", "other code"), ("gradients", "exit 0")):
        lines.append(by[case].said)
    lines += ["```", ""]
    lines.append(
        f"One run under `torchrun --max-restarts {len(restarts)}` met {len(restarts)} faults in turn: SIGKILL in each "
        f"phase but the last, each fault in a forward pass, {args.random} of both at random. The weights at the end "
        f"{'are' if equal else 'are NOT'} the bits of a run without (dropout of features and of attention)."
    )
    print(write(args.out, "faults.md", lines))


def prepare(folder: str) -> None:
    """Partition a graph into two parts."""
    pyg_sar.partition(dataset("Community/400/4000", "data"), 2, f"{folder}/graph")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:5], int(sys.argv[5]), [tuple(it.split("/")) for it in sys.argv[6:]])
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--random", type=int, default=10, help="faults at random under torchrun")
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
