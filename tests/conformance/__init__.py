"""Replays plan vectors through the client of a running planner."""
