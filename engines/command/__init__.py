"""Any server with an OpenAI API over HTTP, run as an engine: an adapter and its child."""
