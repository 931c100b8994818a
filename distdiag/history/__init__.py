"""Questions to many runs: rows from their databases, a Parquet file, and DuckDB."""
