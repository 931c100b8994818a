"""Probes: one runnable script each."""
