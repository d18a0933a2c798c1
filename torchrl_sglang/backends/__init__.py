"""The engine: processes and HTTP. Knows no TensorDict and no torch.distributed."""
