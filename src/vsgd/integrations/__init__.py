"""Training frameworks that call the optimizer themselves. See docs/integrations.md."""
