"""The command line, one verb per module."""
