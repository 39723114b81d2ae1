"""One module a dashboard."""
