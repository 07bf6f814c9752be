"""Inference engines, and the contract each keeps with supervisor and gateway."""
