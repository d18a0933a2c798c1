"""Ways for bytes to reach the servers; each one implements ``base.WeightTransport``."""
