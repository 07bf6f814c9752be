"""The native engine: `transformers` models over shared weights and a slot-organised KV arena."""
