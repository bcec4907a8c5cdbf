"""The planner: owns page tables and plans paged attention for engines on the same machine."""
