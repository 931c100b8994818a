"""For assistants: a run as read-only tools (`distdiag mcp`), and a page that explains our output (`distdiag skill`)."""
