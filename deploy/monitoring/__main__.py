"""`python -m deploy.monitoring`: writes the dashboard and the alerts into deploy/grafana/."""

from deploy.monitoring.files import write

write()
