"""Compare training on all workers with PyG in one process: losses, outputs and every gradient, in double precision.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/check.py runs/community-2 Community

Given trained weights (``--weights``), it also compares their predictions on the whole graph.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
import torch_geometric.nn
from models import GNN
from safetensors.torch import load_file

import pyg_sar
from pyg_sar.data.datasets import dataset
from pyg_sar.distributed.group import gather_objects

parser = argparse.ArgumentParser()
parser.add_argument("data", help="a folder made by 'pyg-sar partition'")
parser.add_argument("dataset", help="the data set it was made from")
parser.add_argument("--root", default="data")
parser.add_argument("--model", choices=["sage", "gat"], default="sage")
parser.add_argument("--hidden", type=int, default=16)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--weights", help="safetensors file written by train.py --save")
parser.add_argument("--tolerance", type=float, default=1e-9)


def fit(model: torch.nn.Module, data: object, epochs: int) -> tuple[list[float], torch.Tensor]:
    """Train without dropout; the same lines serve one process and many."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = pyg_sar.global_mean(F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none"))
        loss.backward()
        pyg_sar.sum_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses, out.detach()


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    """All gradients in one vector: a bias before batch normalisation has none but rounding errors of its own."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def main(args: argparse.Namespace, rank: int) -> int:
    data = pyg_sar.load(args.data)
    data.x = data.x.double()
    torch.manual_seed(0)
    model = GNN(pyg_sar.nn, args.model, data.x.size(1), args.hidden, data.num_classes, dropout=0.0).double()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    losses, out = fit(model, data, args.epochs)
    shares = gather_objects((data.n_id, out))
    grads = flat_gradient(model)
    weights = load_file(args.weights) if args.weights else None
    logits = None
    if weights is not None:
        heads = weights["convs.0.att_src"].size(1) if args.model == "gat" else 1
        hidden = weights["norms.0.module.weight"].numel() // heads
        trained = GNN(pyg_sar.nn, args.model, data.x.size(1), hidden, data.num_classes, heads).eval()
        trained.load_state_dict(weights)
        with torch.no_grad():
            logits = gather_objects((data.n_id, trained(data.x.float(), data.edge_index)))
    # The workers part here; rank 0 goes on alone, without a process group.
    pyg_sar.distributed.process_group.leave()
    if rank != 0:
        return 0

    torch.set_num_threads(torch.multiprocessing.cpu_count())
    whole = dataset(args.dataset, args.root)
    whole.x = whole.x.double()
    reference = GNN(
        torch_geometric.nn, args.model, whole.x.size(1), args.hidden, whole.num_classes, dropout=0.0
    ).double()
    reference.load_state_dict(start)
    ref_losses, ref_out = fit(reference, whole, args.epochs)
    found = torch.empty_like(ref_out)
    for n_id, rows in shares:
        found[n_id] = rows
    errors = {
        "loss curve": max(abs(a - b) / abs(b) for a, b in zip(losses, ref_losses, strict=True)),
        "output": difference(found, ref_out),
        "gradients": difference(grads, flat_gradient(reference)),
    }
    print(f"{args.model} on {len(shares)} workers against PyG in one process, {args.epochs} epochs in float64:")
    for name, error in errors.items():
        print(f"  largest relative difference, {name:10s} {error:.2e}")
    if weights is not None:
        trained = GNN(torch_geometric.nn, args.model, whole.x.size(1), hidden, whole.num_classes, heads).eval()
        trained.load_state_dict(weights)
        with torch.no_grad():
            expected = trained(whole.x.float(), whole.edge_index)
        found = torch.empty_like(expected)
        for n_id, rows in logits:
            found[n_id] = rows
        accs = [pyg_sar.accuracy(o.argmax(-1), whole.y, whole.test_mask) for o in (found, expected)]
        print(f"  trained weights in float32: outputs differ by {difference(found, expected):.2e}, "
              f"test accuracy {accs[0]:.4f} (PyG {accs[1]:.4f})")  # fmt: skip
    good = all(error <= args.tolerance for error in errors.values())
    print("  equal" if good else f"  DIFFERENT: more than {args.tolerance:g}")
    return 0 if good else 1


if __name__ == "__main__":
    with pyg_sar.process_group() as own_rank:
        status = main(parser.parse_args(), own_rank)
    sys.exit(status)
