"""The `ringplan` command: starts the planner and the engine, and talks to them."""
