"""Test helpers: a strict fake server, and quick starts of real ones."""
