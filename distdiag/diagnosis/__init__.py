"""Pure rules: snapshot in, findings out. No I/O beyond loading dumps, no torch."""
