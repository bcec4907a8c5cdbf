"""The engine: runs a model and serves it over gRPC; the planner beside it owns every page table."""
