"""Metrics, events, logs and the journal."""
