"""Kubernetes resources for runs: made from a run file and a site file, sized by the plan that places the run's actors."""
