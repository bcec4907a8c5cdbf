"""The planner's core: pages, streams, plan building, the cache and the ring. numpy and plain Python only."""
