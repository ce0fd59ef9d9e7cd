"""What watches a run from outside: Grafana's dashboard and Prometheus's alerts, made from the registry of metrics."""
