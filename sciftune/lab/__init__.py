"""Launch, watch, report and compare runs; the commands of `sciftune` and its notebooks."""
