"""Inference engines and the contract that every engine keeps with the supervisor and the gateway."""
