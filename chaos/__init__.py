"""Chaos: faults, load, history, and the checkers that judge it. Nothing imports it."""
