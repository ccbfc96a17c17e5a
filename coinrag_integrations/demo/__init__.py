"""The demo: an invented archipelago's encyclopedia, questions about it, and a small real model."""
