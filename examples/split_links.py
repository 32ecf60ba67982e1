"""Hold edges of a graph back for link prediction, before it is cut into parts.

    python examples/split_links.py Planetoid/Cora parts/cora_links.pt
    pyg-sar partition parts/cora_links.pt --num-parts 2 --out parts/cora_links

What is written has the edges of training as ``edge_index``, and for "train", "val" and "test" pairs of nodes that are
edges (``val_pos_edge_label_index``) and, but for training, as many that are none (``val_neg_edge_label_index``).
"""

import argparse
from pathlib import Path

import torch
import torch_geometric.transforms as T

from pyg_sar.data.datasets import dataset

parser = argparse.ArgumentParser()
parser.add_argument("dataset", help="as for 'pyg-sar partition'")
parser.add_argument("out", help="file .pt to write")
parser.add_argument("--root", default="data")
args = parser.parse_args()

torch.manual_seed(0)
split = T.RandomLinkSplit(num_val=0.05, num_test=0.1, is_undirected=True, split_labels=True,
                          add_negative_train_samples=False)  # fmt: skip
data = T.Compose([T.ToUndirected(), T.NormalizeFeatures()])(dataset(args.dataset, args.root))
for name, part in zip(("train", "val", "test"), split(data), strict=True):
    if name == "train":
        kept = part.clone()
        del kept.pos_edge_label_index, kept.pos_edge_label
    kept[f"{name}_pos_edge_label_index"] = part.pos_edge_label_index
    if name != "train":
        kept[f"{name}_neg_edge_label_index"] = part.neg_edge_label_index
Path(args.out).parent.mkdir(parents=True, exist_ok=True)
torch.save(kept, args.out)
