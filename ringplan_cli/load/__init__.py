"""An open-loop load test of a running engine: schedule, calls, report, plots."""
