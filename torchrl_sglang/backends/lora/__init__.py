"""LoRA adapters: ``payload`` reads and checks one, ``registry`` loads it everywhere."""
