"""Chaos: faults, load, history and the checkers that judge it. May import anything; nothing imports it."""
