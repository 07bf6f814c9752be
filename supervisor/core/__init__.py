"""Pure decisions: states, transition tables, policy. No I/O, no clock, no asyncio."""
