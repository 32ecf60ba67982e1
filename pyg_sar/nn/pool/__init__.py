"""Pooling over the graphs of a batch that workers share."""
