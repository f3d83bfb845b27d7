"""What tests stand on: ranks, launchers, models, training loops, and scripts that a test runs."""
