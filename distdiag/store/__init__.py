"""The run directory and its database: schema, one writer, many readers. Imports neither torch nor textual."""

SCHEMA_VERSION = 1  # of run.db; readers refuse what they do not know
