"""The diagnosis: judges snapshots of a job, and knows neither pages nor databases. It reads source files by a function that it gets."""
