"""Is this machine fit to run distributed jobs: one check per fact, each with what was found and what to do."""
