"""`python -m deploy.monitoring`: writes the dashboard and the alerts into deploy/grafana/."""

from deploy.docs import write
from deploy.monitoring.files import files

write(files(), folder="deploy/grafana")
