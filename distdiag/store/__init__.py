"""The run directory and its database: schema, one writer, many readers. Imports neither torch nor textual."""
