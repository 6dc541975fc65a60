"""The machine beneath `hyperpodrun`: one agent a node. Nothing in here imports torch (tests/test_layers.py)."""
