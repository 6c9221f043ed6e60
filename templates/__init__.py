"""jinja2 templates of the emitted source (package data)."""
