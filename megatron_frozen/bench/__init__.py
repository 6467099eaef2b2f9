"""Measurements: never tests, always with what they were measured on."""
