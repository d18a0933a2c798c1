"""What the tests stand on: a strict fake server, and quick starts of real ones."""
