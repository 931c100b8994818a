"""Kineto traces of several ranks: read, analysed, merged. Imports no torch; a trace is input that may be hostile."""
