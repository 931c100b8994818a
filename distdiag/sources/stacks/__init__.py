"""Reads the Python stacks of ranks that nobody recorded: text or JSON of `py-spy dump`, and text of faulthandler."""
