"""PyG's models that need more than other layers, and embeddings of nodes."""
