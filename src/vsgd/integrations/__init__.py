"""Integrations with training frameworks. See docs/integrations.md."""
