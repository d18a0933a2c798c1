"""TensorDict in, TensorDict out. Knows TorchRL, tokenizers and the engine's contract.

One pipeline serves every mode: ``inputs.py`` reads prompts as token ids, the engine
continues or scores them, ``outputs.py`` writes what came back.
"""
