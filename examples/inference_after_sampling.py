"""Train on parts of the graph that are drawn at random in one process, then predict with the whole graph, exactly.

    pyg-sar partition Planetoid/Cora --num-parts 2 --out parts/cora
    python examples/inference_after_sampling.py --train Planetoid/Cora --weights parts/cora.safetensors
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/inference_after_sampling.py \
        --dataset parts/cora --weights parts/cora.safetensors

The second command is plain PyG, on a machine that holds the graph but not a training step of it; the third is not.
"""

import argparse

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn import GraphSAGE

import pyg_sar
from pyg_sar.data.datasets import dataset
from pyg_sar.data.partition import prepare

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/cora", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--train", help="train on this data set, named as for 'pyg-sar partition', and stop")
parser.add_argument("--weights", required=True, help="safetensors file")
parser.add_argument("--root", default="data")
parser.add_argument("--split", type=int, help="train on this one of several splits")
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--pieces", type=int, default=4, help="into which nodes are dealt out anew in each epoch")
parser.add_argument("--epochs", type=int, default=50)
args = parser.parse_args()


def network(data):
    return GraphSAGE(data.num_features, args.hidden, 2, data.num_classes, dropout=0.5)


def train():
    data = prepare(dataset(args.train, args.root), split=args.split)
    model = network(data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(1, args.epochs + 1):
        for piece in RandomNodeLoader(data, args.pieces, shuffle=True):
            optimizer.zero_grad()
            out = model(piece.x, piece.edge_index)[piece.train_mask]
            loss = F.cross_entropy(out, piece.y[piece.train_mask], reduction="sum") / max(len(out), 1)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch:3d}  loss {loss:.4f}")
    save_file(model.state_dict(), args.weights)


def predict(rank):
    data = pyg_sar.load(args.dataset)
    model = network(data)
    model.load_state_dict(load_file(args.weights))
    with torch.no_grad():
        pred = pyg_sar.inference(model, data.x, data.edge_index).argmax(dim=-1)
    accuracy = pyg_sar.accuracy(pred, data.y, data.test_mask)
    if rank == 0:
        print(f"test accuracy {accuracy:.4f} with all neighbors of all nodes")


if __name__ == "__main__":
    if args.train:
        train()
    else:
        with pyg_sar.process_group() as own_rank:
            predict(own_rank)
