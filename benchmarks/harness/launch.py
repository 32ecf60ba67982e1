"""Run a benchmark script on some workers and read what its ranks print."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))  # whose models benchmarks train

from models import GNN, DeepGNN  # noqa: E402, F401

MARK = "RESULT "


def launch(script: str, workers: int, args: list[str], threads: int = 1, **settings: str) -> list[Any]:
    """Run ``script --worker`` on ``workers`` processes; 0 means one process without ``torch.distributed.run``.

    ``settings`` are environment variables.
    """
    command = [sys.executable]
    if workers > 0:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    env = environment(threads, **settings)
    done = subprocess.run([*command, script, "--worker", *args], env=env, capture_output=True, text=True)
    answers = results(done.stdout)
    if done.returncode != 0 or len(answers) != max(workers, 1):
        raise RuntimeError(f"{script} {args} on {workers} workers failed:\n{done.stdout}\n{done.stderr}")
    return answers


def words(**options: Any) -> list[str]:
    """Return options as arguments of a worker."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def asked(**options: Any) -> argparse.Namespace | None:
    """Return what a worker was told by :func:`words`, if this process is one; ``options`` are types, ``[type]`` for
    several values.
    """
    if sys.argv[1:2] != ["--worker"]:
        return None
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    for name, kind in options.items():
        if isinstance(kind, list):
            parser.add_argument(f"--{name}", nargs="+", type=kind[0])
        else:
            parser.add_argument(f"--{name}", type=kind)
    return parser.parse_args()


def environment(threads: int = 1, **settings: str) -> dict[str, str]:
    """Return the environment variables of a worker."""
    paths = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths), **settings}


def results(output: str) -> list[Any]:
    """Return what ranks have answered."""
    return [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]


def answer(result: Any) -> None:
    """Print the result of one rank, in one write and on a line of its own, so that ranks do not mix their lines."""
    sys.stdout.write(f"\n{MARK}{json.dumps(result)}\n")
    sys.stdout.flush()
