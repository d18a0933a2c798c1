"""LoRA adapters: ``payload`` reads and checks their tensors, and ``names`` parses
their names in requests and on servers. ``fleet`` loads and drops them.

Unsuitable adapters are refused by ``payload.py::check_kind`` for their configuration,
and by ``weight_update/sources/peft.py::trained_adapter`` for their model.
"""
