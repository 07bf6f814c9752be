"""The weight cache: one process per device owns the memory that all engines map."""
