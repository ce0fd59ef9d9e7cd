"""Grafana's dashboard and Prometheus's alerts for runs, made from the registry of metrics."""
