"""Health: samples with their own timestamps, from probes, progress words and canaries."""
