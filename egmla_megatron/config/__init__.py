"""Configuration of a run: schema, loading and the checks that need no process group."""
