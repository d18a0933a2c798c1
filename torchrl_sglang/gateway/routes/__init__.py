"""The gateway's HTTP routes."""
