"""What a user calls weights -> (name, tensor) pairs that fit the served model."""
