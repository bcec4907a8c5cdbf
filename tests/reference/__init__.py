"""A naive planner and a simulated KV cache: independent sources of expected values."""
