"""The text the demo model is raised on: a grammar of tales and talk, and a reader for prose."""
