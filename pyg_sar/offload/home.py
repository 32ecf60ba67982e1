"""stub until merged"""
import torch
class Home:
    def __init__(self, folder=None, device=torch.device("cpu"), limit=None): pass
    def empty(self, shape, dtype): return torch.empty(shape, dtype=dtype)
