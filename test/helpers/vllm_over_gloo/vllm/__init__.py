"""The part of vLLM that trainers import, with gloo in the place of NCCL."""
