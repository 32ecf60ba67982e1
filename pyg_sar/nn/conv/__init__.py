"""The base class of distributed layers, and PyG's convolutions on top of it."""
