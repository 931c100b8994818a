"""Looks at a job from outside that was not recorded: finds its ranks on this host, and samples their stacks with py-spy."""
