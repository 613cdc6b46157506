"""When to do what: plans, schedules, caches and runs of sparse attention. Knows no host."""
