"""Replays plan vectors against a planner and says where its plans differ from them (docs/conformance.md)."""
