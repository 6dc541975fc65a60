"""Pure decisions: what to do after a failure. Standard library and `wire` only; no clock, process or socket."""
