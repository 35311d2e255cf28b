"""One file per algorithm: its constants, state, probe, update and evaluation point."""
