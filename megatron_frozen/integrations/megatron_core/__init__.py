"""Megatron-core: a patch for its own layers, and layers of ours for its module specs.

Importing this package does not import megatron-core; using it does.
"""
