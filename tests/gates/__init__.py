"""The rules of this repository as pure functions from source to findings; tests/unit/test_gates*.py apply them."""
