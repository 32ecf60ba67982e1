"""Normalisation layers whose statistics cover the nodes of all workers."""
