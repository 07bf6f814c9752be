"""The topology file: schema, loading, checking."""
