"""Checks that this machine can run distributed jobs: one per fact, each with what was found and what to do."""
